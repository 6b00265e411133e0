"""The devices that the engine computes on, behind the one protocol of ``base``."""
