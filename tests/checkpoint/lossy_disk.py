"""What a disk may hold after a power loss: record what a process does to files, and lose a part.

A library of C, loaded before the others, records each change of files in one folder, after the
system call that made it succeeded. :class:`Disk` is fed with these events and keeps apart what was
synced and what was not. A loss keeps everything that was synced. Of the rest:

- each sector of 512 bytes is as it was, as any later write left it, or, where it is new, zero;
- each file has the size that it had at the sync, or after any write or truncation since;
- each file that was created, renamed or removed since its folder was synced may be so, or not.
  A sync of a file does not sync its name, which POSIX allows.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
SECTOR = 512

RECORDER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

/* The name within the folder, "" for the folder itself, NULL for what is elsewhere. */
static const char *within(const char *path) {
    const char *folder = getenv("RECORD_FOLDER");
    size_t n = folder ? strlen(folder) : 0;
    if (n == 0 || strncmp(path, folder, n)) return NULL;
    return path[n] == '/' ? path + n + 1 : path[n] ? NULL : path + n;
}

static const char *name_of(int file) {
    static __thread char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    return within(path);
}

static void record(char kind, const char *name, long long at, const void *content, size_t n) {
    static int log = -1;
    if (log < 0)
        log = REAL(int, open, const char *, int, int)(
            getenv("RECORD_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char head[PATH_MAX + 64];
    int length = snprintf(head, sizeof head, "%c %lld %zu %s\n", kind, at, n, name);
    struct iovec parts[] = {{head, length}, {(void *)content, n}};
    if (writev(log, parts, 2) != (ssize_t)(length + n)) abort();
}

#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list); \
    int file = REAL(int, name, const char *, int, int)(path, flags, mode); \
    const char *inside = file < 0 ? NULL : name_of(file); \
    if (inside && (flags & O_CREAT)) record('c', inside, 0, "", 0); \
    if (inside && (flags & O_TRUNC)) record('t', inside, 0, "", 0); \
    return file; }
OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *content, size_t n) {
    ssize_t done = REAL(ssize_t, write, int, const void *, size_t)(file, content, n);
    const char *inside = done > 0 ? name_of(file) : NULL;
    if (inside) record('w', inside, lseek(file, 0, SEEK_CUR) - done, content, done);
    return done;
}

#define PWRITE(name) ssize_t name(int file, const void *content, size_t n, off64_t at) { \
    ssize_t done = REAL(ssize_t, name, int, const void *, size_t, off64_t)(file, content, n, at); \
    const char *inside = done > 0 ? name_of(file) : NULL; \
    if (inside) record('w', inside, at, content, done); \
    return done; }
PWRITE(pwrite)
PWRITE(pwrite64)

#define TRUNCATE(name) int name(int file, off64_t size) { \
    int failed = REAL(int, name, int, off64_t)(file, size); \
    const char *inside = failed ? NULL : name_of(file); \
    if (inside) record('t', inside, size, "", 0); \
    return failed; }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define SYNC(name) int name(int file) { \
    int failed = REAL(int, name, int)(file); \
    const char *inside = failed ? NULL : name_of(file); \
    if (inside) record('s', inside, 0, "", 0); \
    return failed; }
SYNC(fsync)
SYNC(fdatasync)

int unlink(const char *path) {
    int failed = REAL(int, unlink, const char *)(path);
    const char *inside = failed ? NULL : within(path);
    if (inside) record('u', inside, 0, "", 0);
    return failed;
}

int rename(const char *path, const char *to) {
    int failed = REAL(int, rename, const char *, const char *)(path, to);
    const char *inside = failed ? NULL : within(path);
    if (inside) record('r', inside, 0, within(to), strlen(within(to)));
    return failed;
}
"""


def recorder(folder: Path) -> Path:
    """Compile the library that records."""
    (folder / "recorder.c").write_text(RECORDER)
    words = "cc -shared -fPIC -o recorder.so recorder.c -ldl"
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return folder / "recorder.so"


# The disk.


class Event(NamedTuple):
    """One change: c(reate), w(rite), t(runcate), s(ync), u(nlink) or r(ename)."""

    kind: str
    name: str
    at: int
    content: bytes
    end: int  # bytes of the log up to here


def events_of(log: Path) -> Iterator[Event]:
    recorded, end = log.read_bytes(), 0
    while end < len(recorded):
        start = recorded.index(b"\n", end) + 1
        kind, at, n, name = recorded[end : start - 1].decode().split(" ", 3)
        end = start + int(n)
        yield Event(kind, name, int(at), recorded[start:end], end)


class Chooser:
    """Chooses among the versions of a thing, the oldest first; each loss prefers others."""

    def __init__(self, pick: random.Random) -> None:
        self.pick = pick
        self.newest, self.oldest = pick.choice(
            [(1.0, 0.0), (0.0, 1.0), (0.9, 0.1), (0.1, 0.9), (0.5, 0.5), (0.3, 0.3)]
        )

    def __call__(self, versions: Sequence[T]) -> T:
        which = self.pick.random()
        if which < self.newest:
            return versions[-1]
        return versions[0] if which < self.newest + self.oldest else self.pick.choice(versions)


@dataclass(eq=False)
class File:
    """A file as processes see it, and what its sectors and its size were since the last sync."""

    content: bytearray
    sizes: list[int] = field(init=False)
    sectors: dict[int, list[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.sync()

    def sync(self) -> None:
        self.sizes, self.sectors = [len(self.content)], {}

    def write(self, at: int, content: bytes, size: int) -> None:
        end = at + len(content)
        touched = range(at // SECTOR, -(-end // SECTOR))
        whole = self._padded(end)
        before = [bytes(whole[i * SECTOR : (i + 1) * SECTOR]) for i in touched]
        whole[at:end] = content
        for i, old in zip(touched, before, strict=True):
            versions = self.sectors.setdefault(i, [old])
            versions.append(bytes(whole[i * SECTOR : (i + 1) * SECTOR]))
        self.content = whole[:size]
        self.sizes.append(size)

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it by zeros."""
        start = min(size, len(self.content))
        self.write(start, bytes(max(size, len(self.content)) - start), size)

    def lost(self, chosen: Chooser) -> bytes:
        """Return what may be there after a loss."""
        size = chosen(self.sizes)
        left = self._padded(size)
        for i, versions in self.sectors.items():
            if (i + 1) * SECTOR <= len(left):
                left[i * SECTOR : (i + 1) * SECTOR] = chosen(versions)
        return bytes(left[:size])

    def _padded(self, size: int) -> bytearray:
        """Return the content, extended by zeros to whole sectors and at least to a size."""
        return self.content.ljust(-(-max(size, len(self.content)) // SECTOR) * SECTOR, b"\0")


class Disk:
    """The files of a folder, which had ``held`` before, all of it synced."""

    def __init__(self, held: dict[str, bytes]) -> None:
        self.names = {name: File(bytearray(content)) for name, content in held.items()}
        self._sync_names()

    def _sync_names(self) -> None:
        self._synced = dict(self.names)
        self._changes: list[tuple[str, str | None, File]] = []  # old name, new name, of a file

    def feed(self, event: Event) -> None:
        kind, name, at, content, _ = event
        if kind == "s" and name == "":
            self._sync_names()
        elif kind == "c" and name not in self.names:
            self._change_name(name, name, File(bytearray()))
        elif name not in self.names:  # an open file that was removed
            return
        elif kind in "ur":
            self._change_name(name, content.decode() or None, self.names[name])
        elif kind == "w":
            file = self.names[name]
            file.write(at, content, max(len(file.content), at + len(content)))
        elif kind == "t":
            self.names[name].truncate(at)
        elif kind == "s":
            self.names[name].sync()

    def _change_name(self, *change: Any) -> None:
        self._changes.append(change)
        _apply(self.names, *change)

    def held(self) -> dict[str, bytes]:
        """Return the files as processes see them."""
        return {name: bytes(file.content) for name, file in self.names.items()}

    def lost(self, pick: random.Random) -> dict[str, bytes]:
        """Return the files as they may be after a loss."""
        chosen, names = Chooser(pick), dict(self._synced)
        for change in self._changes:
            if chosen([False, True]):
                _apply(names, *change)
        return {name: file.lost(chosen) for name, file in names.items()}


def _apply(names: dict[str, File], old: str, new: str | None, file: File) -> None:
    names.pop(old, None)
    if new is not None:
        names[new] = file


def write_files(folder: Path, held: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in held.items():
        (folder / name).write_bytes(content)
