"""Modules used by train_enwik8.py alone: settings, text, run folder, pictures, sampling and the decode check."""
