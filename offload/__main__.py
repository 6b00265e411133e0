"""``python -m overspill``: the same as the ``overspill`` command."""

from __future__ import annotations

from .cli import main

main()
