"""Callbacks for trainers of other projects: lightning.py and transformers.py.

Both save the state of a model's hook, by trainer_state.py.
"""
