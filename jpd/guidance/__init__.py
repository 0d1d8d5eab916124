"""Guided decoding: grammars compiled for a vocabulary, and which tokens each answer may take next.

Only this package knows `llguidance`. A grammar is compiled once; every attempt follows a copy.
"""
