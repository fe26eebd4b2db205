"""Meshes, shardings and processes."""
