"""The record of a run: options, folder, checkpoints, log, faults, and what a person sees."""
