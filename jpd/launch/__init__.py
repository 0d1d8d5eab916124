"""Launchers: from a model and a mesh file to running workers."""
