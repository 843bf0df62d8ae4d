"""Checkpointable iterators for randomised loading of data sets far larger than memory."""
__version__ = "0.2.0"
