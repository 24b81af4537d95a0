"""Callbacks for trainers of other projects."""
