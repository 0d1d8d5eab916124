"""Model sources: checkpoints of every format read straight into shardings, cards and tokenizers."""
