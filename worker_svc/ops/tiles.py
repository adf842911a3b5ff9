"""The innermost loops of a matrix product: R rows by C panels of 16 outputs, in registers.

Knows how a tile is written in LLVM's text, and which tiles suit which registers. Does not know threads or tensors.
Invariant: an output of a tile is `acc = fma(x[k], w[k], acc)` over ascending k, from zero, in fp32, each output alone;
so its bits depend on its row and its column only, and are the same for every tile, vector width and processor.

A panel is [K, 16]: the weights of 16 outputs, side by side for each k; fp32, or bfloat16 that is widened as it is read.
The rows of a tile come as [K, R] in fp32, so that one pointer walks over both.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.ops.native import assemble, has_feature

LANES = 16  # outputs of a panel
UNROLL = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """Vector width in floats, and for each number of rows how many panels a tile takes at a time."""

    width: int
    panels: tuple[tuple[int, ...], ...]  # [R - 1]: ascending

    @property
    def max_rows(self) -> int:
        return len(self.panels)


# Enough independent sums to hide the latency of an fma, and no more registers than there are.
AVX512 = Tiling(16, ((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2)))
AVX2 = Tiling(8, ((1, 2, 4), (1, 2), (1,), (1,), (1,), (1,)))
NEON = Tiling(4, ((1, 2), (1,), (1,), (1,), (1,), (1,)))


def best_tiling() -> Tiling:
    if has_feature("avx512f"):
        return AVX512
    return AVX2 if has_feature("avx2") else NEON


@dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """table [R - 1, 3]: addresses of the tiles of 1, 2 and 4 panels, 0 where there is none.

    A tile is called with (x, w, bytes from panel to panel, K, out, bytes from row to row of out).
    """

    table: NDArray[np.int64]


@functools.cache
def tiles(half: bool, tiling: Tiling | None = None) -> Tiles:
    """The tiles for weights in fp32, or in bfloat16 (`half`). Raises RuntimeError where LLVM cannot make them."""
    chosen = tiling or best_tiling()
    shapes = [(rows + 1, count) for rows, counts in enumerate(chosen.panels) for count in counts]
    names = {shape: f"tile_{shape[0]}_{shape[1]}" for shape in shapes}
    text = "\n".join(tile_text(name, *shape, chosen.width, half) for shape, name in names.items())
    code = assemble(f"{_fma_declaration(chosen.width)}\n{text}", names.values())
    table = np.zeros((chosen.max_rows, 3), np.int64)
    for (rows, count), name in names.items():
        table[rows - 1, count // 2] = code.addresses[name]
    return Tiles(table)


def _fma_declaration(width: int) -> str:
    vector = f"<{width} x float>"
    return f"declare {vector} @llvm.fma.v{width}f32({vector}, {vector}, {vector})"


def tile_text(name: str, rows: int, panels: int, width: int, half: bool) -> str:
    """One tile as a function; `width` floats a vector."""
    return _Writer(rows, panels, width, half).function(name)


class _Writer:
    def __init__(self, rows: int, panels: int, width: int, half: bool) -> None:
        self._rows, self._panels, self._width, self._half = rows, panels, width, half
        self._vectors = panels * LANES // width
        self._type = f"<{width} x float>"
        self._item = 2 if half else 4
        self._lines: list[str] = []
        self._count = 0

    def function(self, name: str) -> str:
        self._say(f"define void @{name}(ptr %x, ptr %w, i64 %ws, i64 %k, ptr %out, i64 %os) {{\nentry:")
        for panel in range(self._panels):
            self._say(f"  %wo{panel} = mul i64 %ws, {panel}\n  %w{panel} = getelementptr i8, ptr %w, i64 %wo{panel}")
        self._say(f"  %whole = and i64 %k, {-UNROLL}\n  %none = icmp eq i64 %whole, 0")
        self._say("  br i1 %none, label %between, label %body")
        self._loop("body", UNROLL, "entry", "0", dict.fromkeys(self._cells(), "zeroinitializer"))
        self._say("  %again_body = icmp ult i64 %next_body, %whole\n  br i1 %again_body, label %body, label %between")
        self._say("between:")
        for r, v in self._cells():
            self._say(f"  %m_{r}_{v} = phi {self._type} [ zeroinitializer, %entry ], [ %z_body_{r}_{v}, %body ]")
        self._say("  %left = icmp ult i64 %whole, %k\n  br i1 %left, label %tail, label %done")
        self._loop("tail", 1, "between", "%whole", {(r, v): f"%m_{r}_{v}" for r, v in self._cells()})
        self._say("  %again_tail = icmp ult i64 %next_tail, %k\n  br i1 %again_tail, label %tail, label %done")
        self._say("done:")
        for r, v in self._cells():
            self._say(f"  %d_{r}_{v} = phi {self._type} [ %m_{r}_{v}, %between ], [ %z_tail_{r}_{v}, %tail ]")
        for r in range(self._rows):
            self._say(f"  %oo{r} = mul i64 %os, {r}\n  %o{r} = getelementptr i8, ptr %out, i64 %oo{r}")
            for v in range(self._vectors):
                place = self._new(f"getelementptr float, ptr %o{r}, i64 {v * self._width}")
                self._say(f"  store {self._type} %d_{r}_{v}, ptr {place}, align 4")
        self._say("  ret void\n}")
        return "\n".join(self._lines)

    def _loop(self, label: str, steps: int, before: str, first: str, sums: dict[tuple[int, int], str]) -> None:
        """`steps` values of k at a time, ascending; leaves the sums in %z_label_r_v."""
        self._say(f"{label}:\n  %i_{label} = phi i64 [ {first}, %{before} ], [ %next_{label}, %{label} ]")
        now = {}
        for (r, v), start in sums.items():
            now[r, v] = f"%a_{label}_{r}_{v}"
            self._say(f"  {now[r, v]} = phi {self._type} [ {start}, %{before} ], [ %z_{label}_{r}_{v}, %{label} ]")
        for step in range(steps):
            k = self._new(f"add i64 %i_{label}, {step}")
            row = self._new(f"mul i64 {k}, {4 * self._rows}")
            row = self._new(f"getelementptr i8, ptr %x, i64 {row}")
            offset = self._new(f"mul i64 {k}, {LANES * self._item}")
            weights = [self._weights(v, offset) for v in range(self._vectors)]
            for r in range(self._rows):
                x = self._spread(row, r)
                for v in range(self._vectors):
                    result = f"%z_{label}_{r}_{v}" if step == steps - 1 else self._name()
                    terms = f"{self._type} {x}, {self._type} {weights[v]}, {self._type} {now[r, v]}"
                    self._say(f"  {result} = call {self._type} @llvm.fma.v{self._width}f32({terms})")
                    now[r, v] = result
        self._say(f"  %next_{label} = add i64 %i_{label}, {steps}")

    def _weights(self, vector: int, offset: str) -> str:
        panel, lane = divmod(vector * self._width, LANES)
        at = self._new(f"getelementptr i8, ptr %w{panel}, i64 {offset}")
        at = self._new(f"getelementptr i8, ptr {at}, i64 {lane * self._item}")
        if not self._half:
            return self._new(f"load {self._type}, ptr {at}, align 4")
        bits = self._new(f"load <{self._width} x i16>, ptr {at}, align 2")
        wide = self._new(f"zext <{self._width} x i16> {bits} to <{self._width} x i32>")
        sixteen = ", ".join(["i32 16"] * self._width)
        high = self._new(f"shl <{self._width} x i32> {wide}, <{sixteen}>")
        return self._new(f"bitcast <{self._width} x i32> {high} to {self._type}")

    def _spread(self, row: str, r: int) -> str:
        at = self._new(f"getelementptr i8, ptr {row}, i64 {4 * r}")
        one = self._new(f"load float, ptr {at}, align 4")
        first = self._new(f"insertelement {self._type} poison, float {one}, i64 0")
        return self._new(
            f"shufflevector {self._type} {first}, {self._type} poison, <{self._width} x i32> zeroinitializer"
        )

    def _cells(self) -> list[tuple[int, int]]:
        return [(r, v) for r in range(self._rows) for v in range(self._vectors)]

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _name(self) -> str:
        self._count += 1
        return f"%t{self._count}"

    def _new(self, expression: str) -> str:
        name = self._name()
        self._say(f"  {name} = {expression}")
        return name
