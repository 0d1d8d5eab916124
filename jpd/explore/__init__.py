"""The control plane explored: real router and workers, no devices, any order of events."""
