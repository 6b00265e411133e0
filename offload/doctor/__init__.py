"""What a machine has and can do for the engine, looked at without measuring anything."""
