"""Private PyTorch interfaces stand in one file, and no file reaches into another's own things."""

from __future__ import annotations

import ast

from .sources import Source, package_sources

THE_FILE = "offload/private/torch_private.py"
CHECKPOINT_FILE = "offload/private/checkpoint_private.py"
OPTIMIZER_FILE = "offload/private/optimizer_private.py"
MODULE_FILE = "offload/private/module_private.py"
COMPILE_FILE = "offload/private/compile_private.py"
FSDP_FILE = "offload/ranks/fsdp_private.py"  # what FSDP2 keeps to itself
# Documented under these names by PyTorch, and by Python for named tuples.
PUBLIC_ALL_THE_SAME = ("_foreach_", "_asdict", "_fields", "_make", "_replace", "_current_frames",
                       "_python_dispatch")  # fmt: skip
OWNERS = ("self", "cls", "mcs")
# What a framework, or Python, has no other way to ask for, in the one file that is for it.
OF_FRAMEWORKS = {
    "offload/integrations/accelerate.py": {"_models", "_optimizers"},
    "offload/closeable.py": {"_is_owned"},
    "offload/private/buffers_private.py": {
        "_buffers",
        "_parameters",
        "_non_persistent_buffers_set",
    },
    "offload/private/peft_private.py": {"_activate_lora"},
}


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not (name.startswith("__") and name.endswith("__"))
        and not name.startswith(PUBLIC_ALL_THE_SAME)
    )


def own_names(source: Source) -> set[str]:
    """Private names that the file itself gives to something."""
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in OWNERS
        ):
            names.add(node.attr)
    return names


def foreign_private(source: Source) -> list[str]:
    """Places where the file touches a private thing that is not its own."""
    own = own_names(source) | OF_FRAMEWORKS.get(source.path, set())
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in OWNERS):
                found.append(f"{source.path}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            # The two extensions are private to the package that loads them.
            names = [alias.name for alias in node.names if alias.name != "_native"]
            if any(map(is_private, [part for part in parts if part != "_native"] + names)):
                found.append(f"{source.path}:{node.lineno} imports {node.module}: {names}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(is_private, alias.name.split("."))):
                    found.append(f"{source.path}:{node.lineno} imports {alias.name}")
    return found


def test_private_things_stay_where_they_are() -> None:
    found = [
        line
        for source in package_sources()
        if source.path
        not in (THE_FILE, CHECKPOINT_FILE, OPTIMIZER_FILE, MODULE_FILE, FSDP_FILE, COMPILE_FILE)
        for line in foreign_private(source)
    ]
    assert not found, "\n".join([f"PyTorch's go into {THE_FILE}, ours stay private:", *found])


def test_the_one_file_is_what_is_looked_for() -> None:
    assert len(foreign_private(Source(THE_FILE))) >= 5


# Generators whose end does nothing that would harm if the collector did it late: an interrupt at
# the begin of contextlib's ``__exit__``, and an exception that somebody keeps, leave it to that.
HARMLESS_LATE = {
    "io_engine/atomic_files.py",  # a draft that stays is removed by the next writer
    "offload/cli/failures.py",
    "offload/cli/heap.py",
    "offload/durable/commits.py",  # ``editing`` does nothing where the block does not end well
    "offload/movement/accelerators/sim.py",
    "offload/state/edits.py",  # nor does ``of``
    "offload/state/initial.py",
    "offload/train/ranks.py",  # a process that ends leaves its group
    "offload/private/handles.py",
    "optim/bench.py",
    "optim/streamed.py",  # ``_named_errors`` does nothing where the block ends well
}


def test_no_block_of_the_engine_is_ended_by_the_collector() -> None:
    seen = {
        source.path
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef)
        and any("contextmanager" in ast.unparse(each) for each in node.decorator_list)
    }
    assert seen == HARMLESS_LATE
