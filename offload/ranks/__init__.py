"""Models that ``torch.distributed`` has sharded or replicated, wrapped rank by rank."""
