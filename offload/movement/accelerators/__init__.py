"""Accelerators: the devices that the engine computes on, behind one protocol (see ``base``)."""
