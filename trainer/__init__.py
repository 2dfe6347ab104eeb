"""Modules used by train_enwik8.py alone: settings, processes, text, run folder, pictures, sampling, decode check."""
