"""Lines of PTX on numpy arrays, for Triton's interpreter, which runs none: what the kernels here
use of it. All threads of a program take each instruction together; what could go wrong in another
order is told by its trace: no word of shared memory may be touched in two ways (read, written,
added to) between two barriers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_BASE: Final = 1 << 12  # of shared memory
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "add.u32": operator.add,
    "sub.u32": operator.sub,
    "shr.u32": operator.rshift,
    "min.u32": np.minimum,
    "xor.b32": operator.xor,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "bfind.u32": lambda a: np.where(a == 0, -1, np.frexp(a)[1] - 1),
}
_COMPARISONS = {"lt": operator.lt, "ge": operator.ge}
_JOINS = {"and": operator.and_, "or": operator.or_}


class SharedMemory:
    """Of a program: what it holds, and what was done with it since the last barrier."""

    def __init__(self, size: int) -> None:
        self.words = np.random.randint(0, 1 << 32, size, dtype=np.uint32)  # nothing is 0 by chance
        self._touched: dict[str, np.ndarray] = {}
        self.barrier()

    def barrier(self) -> None:
        how = ("read", "written", "added to")
        self._touched = {one: np.zeros(len(self.words), bool) for one in how}

    def at(self, addresses: np.ndarray, how: str) -> np.ndarray:
        """Indices of words. Raises AssertionError where a race would be."""
        index = (addresses.astype(np.int64) - _BASE) // 4
        assert ((index >= 0) & (index < len(self.words))).all(), "outside of shared memory"
        for other, touched in self._touched.items():
            assert how == other or not touched[index].any(), f"{how} and {other} without a barrier"
        self._touched[how][index] = True
        return index


class Ptx:
    """Stands in for inline assembly and barriers of the interpreter's builder."""

    def __init__(self) -> None:
        self._shared = SharedMemory(0)

    def barrier(self) -> None:
        self._shared.barrier()

    def run(
        self,
        asm: str,
        constraints: str,
        values: Sequence[Any],
        types: object,
        pure: bool,
        pack: int,
    ) -> Any:
        """What is done by whole warps is done by one for each element, whose lanes all have it."""
        lanes = 32 if ".sync." in asm else 1
        shape, num_out = values[0].data.shape, constraints.count("=")
        given = np.concatenate(
            [value.data.reshape(-1, pack).T.astype(np.uint32) for value in values]
        )
        of = np.zeros((given.shape[1], lanes), np.uint32)
        registers = {f"${num_out + i}": of + given[i][:, None] for i in range(len(given))}
        registers["%laneid"] = of + np.arange(lanes, dtype=np.uint32)
        _Run(self, registers, of).all(asm)
        found = [registers[f"${i}"] for i in range(num_out)]
        assert all((one == one[:, :1]).all() for one in found), "lanes differ"
        packed = [found[i : i + pack] for i in range(0, num_out, pack)]
        results = [np.stack([one[:, 0] for one in part], -1).reshape(shape) for part in packed]
        handles = [TensorHandle(result.astype(np.int32), tl.int32) for result in results]
        return SimpleNamespace(get_result=handles.__getitem__)

    def declare(self, size: int) -> None:
        """Once in a program."""
        self._shared = SharedMemory(size)

    @property
    def shared(self) -> SharedMemory:
        return self._shared


class _Run:
    def __init__(self, ptx: Ptx, registers: dict[str, np.ndarray], like: np.ndarray) -> None:
        self.ptx, self.registers, self.like = ptx, registers, like
        self.active = np.ones(like.shape, bool)

    def all(self, asm: str) -> None:
        assert asm[0] == "{" and asm[-1] == "}"
        for statement in asm[1:-1].split(";"):
            text = statement.strip()
            if label := re.match(r"(\w+):\s*", text):  # the only one: all meet there
                self.active = np.ones(self.like.shape, bool)
                text = text[label.end() :]
            if declared := re.match(r"\.shared .* shared\[(\d+)\]", text):
                self.ptx.declare(int(declared[1]))
            elif text and not text.startswith(".reg"):
                found = re.match(r"(?:@(!?)(\w+) )?(\S+) (.*)", text)
                assert found is not None, text
                self._one(*found.groups())

    def _one(self, negated: str | None, guard: str | None, name: str, rest: str) -> None:
        mask = self.active
        if guard is not None:
            mask = mask & (self.registers[guard] ^ bool(negated))
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if name == "bra":
            self.active = self.active & ~mask
        elif ".shared." in name:
            self._memory(name.split(".")[0], ".v4." in name, operands, mask)
        elif ".sync." in name:
            assert mask.all(), "not all lanes of a warp"
            self._together(name, operands)
        elif name.startswith("setp."):
            _, compare, *join, _ = name.split(".")
            result = _COMPARISONS[compare](self._value(operands[1]), self._value(operands[2]))
            if join:
                result = _JOINS[join[0]](result, self._value(operands[3]))
            self._set(operands[0], result, mask)
        else:
            result = _ARITHMETIC[name](*map(self._value, operands[1:]))
            self._set(operands[0], result.astype(np.uint32), mask)

    def _value(self, operand: str) -> np.ndarray:
        if operand == "shared":
            return self.like + np.uint32(_BASE)
        if re.fullmatch(r"-?\d+", operand):
            return self.like + np.uint32(int(operand) % (1 << 32))
        return self.registers[operand]

    def _set(self, to: str, value: np.ndarray, mask: np.ndarray) -> None:
        old = self.registers.get(to, np.full_like(value, 0x55))
        self.registers[to] = np.where(mask, value, old)

    def _memory(self, kind: str, by_four: bool, operands: list[str], mask: np.ndarray) -> None:
        place, other = operands if kind != "ld" else operands[::-1]
        base, _, offset = place[1:-1].partition(" + ")
        address = (self._value(base) + np.uint32(int(offset or 0)))[mask]
        shared, names = self.ptx.shared, other.strip("{}").split(", ")
        assert not (address % (16 if by_four else 4)).any(), "misaligned"
        for i, name in enumerate(names):
            how = {"ld": "read", "st": "written", "red": "added to"}[kind]
            index = shared.at(address + np.uint32(4 * i), how)
            if kind == "ld":
                loaded = self.like.copy()
                loaded[mask] = shared.words[index]
                self._set(name, loaded, mask)
            elif kind == "st":
                shared.words[index] = self._value(name)[mask]
            else:
                np.add.at(shared.words, index, self._value(name)[mask])

    def _together(self, name: str, operands: list[str]) -> None:
        to, _, found = operands[0].partition("|")
        value, lane = self._value(operands[1]), np.arange(32)
        everywhere = self.active
        if name.startswith("shfl.sync.up"):
            source = lane - int(operands[2])
            self._set(found, np.broadcast_to(source >= 0, value.shape), everywhere)
            result = value[:, np.where(source >= 0, source, lane)]
        elif name.startswith("shfl.sync.idx"):
            result = np.take_along_axis(value, self._value(operands[2]).astype(np.int64) & 31, 1)
        elif name.startswith("redux.sync.add"):
            result = value.sum(1, dtype=np.uint32, keepdims=True) + self.like
        else:
            assert name.startswith("vote.sync.ballot"), name
            bits = value.astype(np.uint32) << lane.astype(np.uint32)
            result = bits.sum(1, dtype=np.uint32, keepdims=True) + self.like
        self._set(to, result, everywhere)
