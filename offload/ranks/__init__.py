"""Many ranks: models that torch.distributed has sharded, wrapped rank by rank."""
