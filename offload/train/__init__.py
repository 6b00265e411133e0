"""The main job: a causal language model trained or fine-tuned under memory budgets."""
