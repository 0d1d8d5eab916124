"""What a model needs on a deployment: the arithmetic of `jpd check`, no weights, no devices."""
