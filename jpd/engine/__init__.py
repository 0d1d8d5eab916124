"""The two engines, prefill and decode: twins with the same verbs, and what they share."""
