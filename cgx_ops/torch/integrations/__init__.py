"""Callbacks for trainers of other projects that save the state of a model's communication hook."""
