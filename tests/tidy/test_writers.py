"""Files outside a store are written in one way, and a kill test covers every place that writes.
See Note [Atomic writes]."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.durable.writers import WRITERS

from .sources import Source, package_sources

MECHANISM = "io_engine/atomic_files.py"
# What writes files by itself, and why it may.
BY_ITSELF = {
    MECHANISM: "the mechanism",
    "io_engine/folders.py": "a part of the mechanism",
    "io_engine/store_file.py": "the store's own files",
    "io_engine/manifest.py": "the store's own files",
    "io_engine/ownership.py": "the store's own files",
    "io_engine/pins.py": "a file without contents, to lock",
    "io_engine/shared_memory.py": "to memory",
    "offload/facts/rates.py": "facts import nothing of ours: it does the same by itself",
    "offload/doctor/disks.py": "a file that is removed at once",
    "offload/durable/files.py": "drafts, which its callers publish",
    "offload/durable/tensors.py": "drafts, which its callers publish",
    "offload/durable/meta.py": "to memory",
    "optim/state_record.py": "to memory",
}
# Calls that write to a file, or put one somewhere.
METHODS = {
    "write_text", "write_bytes", "savefig", "save_pretrained", "save_file", "tofile", "rename",
    "replace", "symlink_to", "hardlink_to", "dump", "copy2", "copyfile", "copytree", "move",
    "NamedTemporaryFile", "mkstemp",
}  # fmt: skip
OF_OS = {
    "replace",
    "rename",
    "renames",
    "link",
    "symlink",
    "pwrite",
    "pwritev",
    "write",
    "truncate",
}
PUBLISHING = {"replacing", "replacing_folder", "write_text", "write_bytes"}
# A folder that the mechanism publishes: what is written to it is a draft.
TO_DRAFTS = {
    "offload/train/outputs.py": {"save_pretrained"},
    "offload/integrations/transformers.py": {"copy2"},
}


def mode_of(call: ast.Call, place: int) -> str:
    given = [k.value for k in call.keywords if k.arg == "mode"] or call.args[place : place + 1]
    return given[0].value if given and isinstance(given[0], ast.Constant) else "r"


def writes(source: Source) -> Iterator[tuple[int, str]]:
    """Calls of a file that write to the disk by themselves."""
    taken = {name for found in source.imports for name in found.names}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        f = node.func
        if isinstance(f, ast.Name):
            if f.id == "open" and set(str(mode_of(node, 1))) & set("wax+"):
                yield node.lineno, "open"
        elif isinstance(f, ast.Attribute):
            owner = f.value.id if isinstance(f.value, ast.Name) else ""
            if owner in ("os", "shutil"):
                if f.attr in OF_OS | METHODS - {"dump"}:
                    yield node.lineno, f.attr
                if f.attr == "open" and any(
                    flag in ast.unparse(node) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT")
                ):
                    yield node.lineno, "os.open"
            elif owner == "torch" and f.attr == "save":
                yield node.lineno, "torch.save"
            elif f.attr == "open" and set(str(mode_of(node, 0))) & set("wax+"):
                yield node.lineno, "open"
            elif f.attr == "replace" and (len(node.args) != 1 or "_" in ast.unparse(f.value)):
                continue  # of a text, or of what an object holds
            elif f.attr in METHODS and not (f.attr in PUBLISHING and f.attr in taken):
                yield node.lineno, f.attr


def is_to_memory(source: Source, line: int) -> bool:
    text = source.text.splitlines()[line - 1]
    return any(each in text for each in ("savefig(data", "dict(facts), target)", "cpu(), memory)"))


def test_no_file_is_written_in_place() -> None:
    found = [
        f"{source.path}:{line} {what}"
        for source in package_sources()
        if source.path not in BY_ITSELF
        for line, what in writes(source)
        if what not in TO_DRAFTS.get(source.path, ()) and not is_to_memory(source, line)
    ]
    assert not found, "\n".join([f"write through {MECHANISM}:", *found])


def test_what_may_write_does() -> None:
    sources = {source.path: source for source in package_sources()}
    idle = [path for path in BY_ITSELF if not list(writes(sources[path]))]
    assert not idle


def test_such_calls_are_found() -> None:
    source = Source("made_up.py")
    source.__dict__["text"] = (
        "open(a, 'w')\nopen(b)\np.open('ab')\np.write_text(c)\nos.replace(a, b)\n"
        "x.replace('a', 'b')\n"
        "torch.save(a, b)\ndraft.replace(p)\nfigure.savefig(p)\nos.open(p, os.O_RDONLY)\n"
        "os.open(p, os.O_WRONLY)\nshutil.copyfile(a, b)\n"
    )
    assert [line for line, _ in writes(source)] == [1, 3, 4, 5, 7, 8, 9, 11, 12]


def test_every_writer_is_killed_somewhere() -> None:
    """Whatever publishes files is in the table of tests/durable/writers.py."""
    publishing = {
        source.path
        for source in package_sources()
        for found in source.imports
        if found.module == "overspill.io_engine.atomic_files" and PUBLISHING & set(found.names)
    }
    tried = {path for writer in WRITERS.values() for path in writer.sources}
    assert len(publishing) > 10
    assert publishing <= tried, sorted(publishing - tried)
