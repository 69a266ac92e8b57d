"""Cut a module tree into units.

A unit is a part of the model that travels as one: usually a block. `units="auto"` follows these rules; sizes are bytes
on the device.

- Owners: every parameter belongs to the module that registers it first, so a tied weight or a shared block counts once.
  Modules that own no parameter are ignored: no unit is empty.
- Blocks: a block is a module with modules of its own that is an element of a ModuleList, or repeats its class in a
  Sequential or ModuleDict, or is one of at least three attributes of one class (two are often two towers), or is of a
  class that the model declares in `_no_split_modules` (transformers). Of nested blocks the outermost is the unit.
- Stages: a stage is a block made of repeated blocks, and then these are the units: a container of blocks, or a block
  of over an eighth of the model of which repeated blocks are three quarters. Small expert models are cut into experts.
- Large modules: the typical unit is the block that contains the median byte, but at least 1/64 of the model. A module
  larger than both four typical units and an eighth of the model is cut into its children.
- Uncut modules: torch.nn's own except its containers, because MultiheadAttention and TransformerEncoderLayer read their
  children's weights; a module that itself owns over an eighth of its bytes, because these could not travel without it;
  and one that would give a single piece. A root that may not be cut is resident as a whole.
- Small parts: a block is small below 1/128 of the typical unit, any other part below a quarter of it. The small parts
  of a block that was cut travel as one: an attention and its norms beside experts that became units.
- The rest: small parts stay on the device, smallest first, up to the bytes of one typical unit, as does what no module
  enters. Small neighbours beyond that are packed together.
- Entries: a unit is entered through the forward of a module. So a module without one (ModuleList, ParameterList) is
  replaced by its children, and parameters without a module to enter (of the root, of one that was cut) are resident.
- Wholes: a frozen parameter that consists of several tensors (a quantised one, of any library) is a *whole*: its
  innermost tensors, its *parts*, are weights of the unit like others, which nothing else knows to belong together. None
  is trained, as no gradient comes back through a whole, or cast, and none shares its bytes with another weight. A
  DTensor is a whole as well, trained or frozen: its only part is this process's shard (wholes.py). It counts as the
  largest one on any rank: the ranks enter units together, so they cut their modules alike.

With class names or a callable the chosen modules are the units, whole, and everything else is resident.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from ..compat.tensors import consists_of_tensors, is_dtensor
from ..errors import PartitionError
from ..host.device import aligned
from .wholes import Sharded, Whole, whole_of

UnitSpec: TypeAlias = str | Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]]

RESIDENT_NAME = "(root)"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Uncut modules: the modules of torch.nn that only call their children.
OPEN_CLASSES = (*CONTAINERS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclass(eq=False, frozen=True)
class FoundUnit:
    """A part of the model that travels as one, or the rest that stays on the device."""

    index: int
    name: str
    # Entering the forward of any of these needs the whole unit. Empty for the resident rest.
    modules: tuple[tuple[str, nn.Module], ...]
    params: tuple[tuple[str, nn.Parameter], ...]
    resident: bool
    wholes: tuple[Whole, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(aligned(param.numel() * param.element_size()) for _, param in self.params)

    @functools.cached_property
    def parts(self) -> frozenset[int]:
        """Ids of the tensors of quantised weights and DTensors: each travels in its own type."""
        return frozenset(id(part) for whole in self.wholes for _, part in whole.parts)


def partition(root: nn.Module, units: UnitSpec = "auto") -> list[FoundUnit]:
    """Cut `root` into units: every parameter is in exactly one, in registration order, the resident rest last.

    Reads names and sizes only, so it works on the meta device too. A module without parameters gives no units.

    Args:
        root: Never a unit itself; its parameters outside of every unit are resident.
        units: "auto", class names (of nested matches the outermost is the unit), or a callable that gets `root` and
            returns modules inside it.
    """
    tree = _Tree(root)
    if not tree.nbytes[root]:
        return []
    if units == "auto":
        pieces = _Auto(tree).pieces()
    elif callable(units):
        pieces = _chosen_pieces(tree, _chosen_by(tree, units))
    else:
        pieces = _chosen_pieces(tree, _of_classes(tree, [units] if isinstance(units, str) else units))
    return _units(tree, pieces)


class _Tree:
    """A module tree in which each module and parameter counts once, at the place that registers it first (owners)."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names: dict[nn.Module, str] = {module: name for name, module in root.named_modules()}
        self.order: dict[nn.Module, int] = {module: index for index, module in enumerate(self.names)}
        self.owned: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {module: [] for module in self.names}
        self.wholes: dict[nn.Module, list[Whole]] = {}
        self.children: dict[nn.Module, list[nn.Module]] = {module: [] for module in self.names}
        self.nbytes: dict[nn.Module, int] = {}
        self._largest: dict[int, int] = {}  # elements of a DTensor's largest shard, by id of this rank's shard
        self._assign_owners()
        self._weigh()

    def _assign_owners(self) -> None:
        """Assign each parameter to the module that registers it first; raise for one that cannot be streamed."""
        seen: set[nn.Parameter] = set()
        for module, prefix in self.names.items():
            for key, param in module._parameters.items():
                if param is None or param in seen:
                    continue
                seen.add(param)
                name = f"{prefix}.{key}" if prefix else key
                if is_lazy(param):
                    raise PartitionError(f"{name} has no shape yet: run one batch through the lazy modules first")
                if isinstance(module, ScriptModule):
                    raise PartitionError(
                        f"{name} is in a TorchScript module, where it cannot be replaced: use the Python module instead"
                    )
                if consists_of_tensors(param):
                    whole = Sharded.of(name, param) if is_dtensor(param) else whole_of(name, param)
                    self.wholes.setdefault(module, []).append(whole)
                    self.owned[module] += whole.parts
                    if isinstance(whole, Sharded):
                        self._largest[id(whole.shard)] = whole.largest_numel()
                    continue
                if getattr(param, "grad_dtype", None) not in (None, param.dtype):
                    raise PartitionError(
                        f"{name} has grad_dtype {param.grad_dtype}, but is {param.dtype}: leave grad_dtype unset"
                    )
                self.owned[module].append((name, param))
        if self.wholes:
            self._check_parts()

    def _check_parts(self) -> None:
        """Raise if a tensor of a quantised weight, or a DTensor's shard, shares its bytes with another weight."""
        parts = {id(part) for wholes in self.wholes.values() for whole in wholes for _, part in whole.parts}
        named = [(weight.data_ptr(), name, weight) for owned in self.owned.values() for name, weight in owned]
        end, last = 0, named[0]  # the furthest byte so far, and whose it is
        for start, name, weight in sorted(named, key=lambda each: each[:2]):
            if start < end and weight.numel() and name != last[1] and parts & {id(last[2]), id(weight)}:
                raise PartitionError(
                    f"{last[1]} shares its memory with {name}, and a part of a weight that consists of several"
                    " tensors can be in one place only: give each weight a copy of its own (weight.clone())"
                )
            steps = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
            if start and weight.numel() and start + (steps + 1) * weight.itemsize > end:  # the meta device has no bytes
                end, last = start + (steps + 1) * weight.itemsize, (start, name, weight)

    def _weigh(self) -> None:
        """Add up the bytes of each module's parameters, and list its children that have any."""
        by_name = {name: module for module, name in self.names.items()}
        for module in reversed(self.names):
            self.children[module].reverse()
            self.nbytes[module] = self.own_nbytes(module)
            self.nbytes[module] += sum(self.nbytes[child] for child in self.children[module])
            if module is not self.root and self.nbytes[module]:
                # The parent in the module's first name: another parent may come earlier in the order of modules.
                self.children[by_name[self.names[module].rpartition(".")[0]]].append(module)

    def own_nbytes(self, module: nn.Module) -> int:
        """Count the bytes of the parameters that the module itself owns: of a DTensor its largest shard on any rank."""
        numel = self._largest.get
        return sum(aligned(numel(id(p), p.numel()) * p.element_size()) for _, p in self.owned[module])

    def below(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the module and its descendants in registration order, each below its first parent only."""
        yield module
        for child in self.children[module]:
            yield from self.below(child)

    def entries(self, module: nn.Module) -> list[nn.Module]:
        """List the modules through whose forward `module` is entered: itself, or without a forward its children's."""
        if _has_forward(module):
            return [module]
        return [entry for child in self.children[module] for entry in self.entries(child)]

    def outermost(self, module: nn.Module, wanted: set[nn.Module]) -> Iterator[nn.Module]:
        """Yield the outermost of the wanted modules below a module, as far as they can be entered."""
        for part in self.children[module]:
            if part in wanted and self.entries(part):
                yield part
            else:
                yield from self.outermost(part, wanted)


@dataclass(frozen=True)
class _Piece:
    """Modules that will be one unit, unless they are small enough to stay on the device (the rest)."""

    name: str
    roots: tuple[nn.Module, ...]
    nbytes: int
    is_block: bool

    @classmethod
    def of(cls, tree: _Tree, module: nn.Module, *, is_block: bool) -> _Piece:
        """Make the piece of one module: entered through its forward, or through its children's if it has none."""
        roots = tuple(tree.entries(module))
        name = tree.names[roots[0] if len(roots) == 1 else module]
        return cls(name, roots, sum(tree.nbytes[root] for root in roots), is_block)

    @classmethod
    def packed(cls, parts: Sequence[_Piece], *, is_block: bool) -> _Piece:
        """Join neighbouring pieces into one piece, named after the first."""
        roots = tuple(root for part in parts for root in part.roots)
        return cls(parts[0].name, roots, sum(part.nbytes for part in parts), is_block)


def _units(tree: _Tree, pieces: Iterable[_Piece]) -> list[FoundUnit]:
    """Turn pieces into units in registration order, followed by the resident rest: all other parameters."""
    units: list[FoundUnit] = []
    covered: set[nn.Module] = set()
    for piece in sorted(pieces, key=lambda piece: tree.order[piece.roots[0]]):
        inside = sorted((module for root in piece.roots for module in tree.below(root)), key=tree.order.__getitem__)
        covered.update(inside)
        units.append(_unit(tree, len(units), piece.name, piece.roots, inside))
    rest = [module for module in tree.names if module not in covered]
    if any(tree.owned[module] for module in rest):
        units.append(_unit(tree, len(units), RESIDENT_NAME, (), rest))
    return units


def _unit(tree: _Tree, index: int, name: str, roots: Iterable[nn.Module], inside: Iterable[nn.Module]) -> FoundUnit:
    """Make a unit of all parameters that the modules `inside` own; without `roots` to enter, a resident one."""
    modules = tuple((tree.names[root], root) for root in roots)
    params = tuple(named for module in inside for named in tree.owned[module])
    wholes = tuple(whole for module in inside for whole in tree.wholes.get(module, ()))
    return FoundUnit(index, name, modules, params, resident=not modules, wholes=wholes)


# --- units="auto" ---------------------------------------------------------------------------------------------------


class _Auto:
    """The automatic cut of one module tree: its blocks, its stages, the typical unit's size, and the pieces."""

    def __init__(self, tree: _Tree) -> None:
        self.tree = tree
        self.total = tree.nbytes[tree.root]
        self.repeated = {element for module in tree.names for element in self._repeated_elements(module)}
        self.blocks = self._blocks()
        self.declared = self._declared()
        self.unit_blocks = (self.declared | self.blocks) - self._stages()  # units, unless they are too large
        block_bytes = [tree.nbytes[block] for block in tree.outermost(tree.root, self.unit_blocks)]
        self.typical = max(_median_byte_size(block_bytes), self.total // 64)
        self.limit = max(4 * self.typical, self.total // 8)

    def pieces(self) -> list[_Piece]:
        """Cut the tree into the pieces that travel: small neighbours are joined, resident pieces are left out."""
        if _is_of_torch(self.tree.root):
            return []
        pieces = self._cut(self.tree.root)
        resident = self._resident(pieces)
        runs = itertools.groupby((piece for piece in pieces if piece not in resident), self._is_small)
        return [piece for small, run in runs for piece in (self._packed(run, is_block=False) if small else run)]

    # Blocks and stages

    def _cuttable_children(self, module: nn.Module) -> list[nn.Module]:
        """List the children into which a module may be cut: none for torch.nn's own modules (uncut modules)."""
        return [] if _is_of_torch(module) else self.tree.children[module]

    def _blocks(self) -> set[nn.Module]:
        """Find the blocks that the structure shows: elements of containers, and large attributes of one class."""
        blocks = set(self.repeated)
        for module in self.tree.names:
            children = self._children_with_children(module)
            if isinstance(module, nn.ModuleList):
                blocks.update(children)
            elif not isinstance(module, CONTAINERS):
                for kind, count in Counter(map(type, children)).items():
                    alike = [child for child in children if type(child) is kind]
                    # Attributes that are a small share of the model would make too many small units.
                    if count >= 3 and 4 * sum(map(self.tree.nbytes.__getitem__, alike)) >= self.total:
                        blocks.update(alike)
        return blocks

    def _children_with_children(self, module: nn.Module) -> list[nn.Module]:
        """List the children into which a module may be cut that have modules of their own."""
        return [child for child in self._cuttable_children(module) if self.tree.children[child]]

    def _repeated_elements(self, module: nn.Module) -> list[nn.Module]:
        """List the elements of a container whose class occurs among them at least twice."""
        children = self._children_with_children(module) if isinstance(module, CONTAINERS) else []
        counts = Counter(map(type, children))
        return [child for child in children if counts[type(child)] >= 2]

    def _declared(self) -> set[nn.Module]:
        """Find the modules of classes that the model names in `_no_split_modules`, except for leaf modules."""
        names = {name for module in self.tree.names for name in getattr(module, "_no_split_modules", None) or ()}
        return {module for module in self.tree.names if type(module).__name__ in names and self.tree.children[module]}

    def _stages(self) -> set[nn.Module]:
        """Find the blocks that are cut: containers of blocks, and what is large and consists of repeated blocks."""
        inner: dict[nn.Module, int] = {}  # bytes of the repeated blocks in each module
        for module in reversed(self.tree.names):
            parts = self._cuttable_children(module)
            inner[module] = sum(self.tree.nbytes[part] if part in self.repeated else inner[part] for part in parts)
        return {
            module
            for module in self.blocks | self.declared
            if self._repeated_elements(module)
            or (8 * self.tree.nbytes[module] > self.total and 4 * inner[module] >= 3 * self.tree.nbytes[module])
        }

    # The cut

    def _cut(self, module: nn.Module) -> list[_Piece]:
        """Cut a module into the pieces of its children; in a block, join the small ones."""
        pieces = [piece for part in self._cuttable_children(module) for piece in self._pieces_of(part)]
        if module not in self.unit_blocks:
            return pieces
        large = [piece for piece in pieces if not self._is_small(piece)]
        return large + self._packed(filter(self._is_small, pieces), is_block=True)

    def _packed(self, pieces: Iterable[_Piece], *, is_block: bool) -> list[_Piece]:
        """Join neighbouring pieces, up to the bytes of a typical unit each."""
        return [_Piece.packed(run, is_block=is_block) for run in _runs(pieces, self.typical)]

    def _pieces_of(self, module: nn.Module) -> list[_Piece]:
        """Return a module as one piece, or the pieces into which it is cut.

        A module is cut if it has no forward to enter, or holds unit blocks and is none itself. One of more bytes than
        `self.limit` is cut where `_comes_apart` allows it.
        """
        holds_none = next(self.tree.outermost(module, self.unit_blocks), None) is None
        stands = module in self.unit_blocks or (holds_none and _has_forward(module))
        whole = _Piece.of(self.tree, module, is_block=module in self.blocks)
        if stands and whole.roots and whole.nbytes <= self.limit:
            return [whole]
        pieces = self._cut(module)
        return [whole] if stands and _has_forward(module) and not self._comes_apart(module, pieces) else pieces

    def _comes_apart(self, module: nn.Module, pieces: Sequence[_Piece]) -> bool:
        """Whether a module may be cut into these pieces: at least two, and an eighth of its bytes or less its own."""
        return len(pieces) > 1 and 8 * self._owned_nbytes(module) <= self.tree.nbytes[module]

    def _owned_nbytes(self, module: nn.Module) -> int:
        """Count the bytes that travel only with `module` itself: its own, and those of children without a forward."""
        own = self.tree.own_nbytes(module)
        return own + sum(self._owned_nbytes(part) for part in self._cuttable_children(module) if not _has_forward(part))

    def _is_small(self, piece: _Piece) -> bool:
        """Whether a piece is below 1/128 of the typical unit if it is a block, or below a quarter of it otherwise."""
        return (128 if piece.is_block else 4) * piece.nbytes < self.typical

    def _resident(self, pieces: Iterable[_Piece]) -> set[_Piece]:
        """Pick the small pieces that stay on the device: the smallest ones, up to the bytes of a typical unit."""
        smallest = sorted(filter(self._is_small, pieces), key=lambda piece: piece.nbytes)
        totals = itertools.accumulate(piece.nbytes for piece in smallest)
        return {piece for piece, total in zip(smallest, totals, strict=True) if total <= self.typical}


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward, of its class or set on the object; TorchScript's have none in Python."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module's class is, or derives from, one of torch.nn that may read its children's weights."""
    bases = (base for base in type(module).__mro__ if base is not nn.Module)
    return not isinstance(module, OPEN_CLASSES) and any(base.__module__.startswith("torch.nn.") for base in bases)


def _median_byte_size(sizes: Iterable[int]) -> int:
    """Return the size of the block that contains the median byte: many small blocks do not hide the few large ones."""
    ascending = sorted(sizes)
    half = sum(ascending) / 2
    passed = itertools.accumulate(ascending)
    return next((size for size, total in zip(ascending, passed, strict=True) if total >= half), 0)


def _runs(pieces: Iterable[_Piece], nbytes: int) -> list[list[_Piece]]:
    """Group consecutive pieces into runs of at most `nbytes`; a larger piece is a run by itself."""
    runs: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        if not runs or piece.nbytes > room:
            runs.append([])
            room = nbytes
        runs[-1].append(piece)
        room -= piece.nbytes
    return runs


# --- units=class names, units=callable ------------------------------------------------------------------------------


def _of_classes(tree: _Tree, class_names: Sequence[str]) -> list[nn.Module]:
    """List the modules of the named classes; raise for a name that the model does not have."""
    own = [module for module in tree.names if module is not tree.root and next(module.parameters(), None) is not None]
    counts = Counter(type(module).__name__ for module in own)
    for class_name in class_names:
        if class_name not in counts:
            raise PartitionError(
                f"units names the class {class_name!r}, which is not in {type(tree.root).__name__}; "
                f"its modules are: {', '.join(f'{name} ({count})' for name, count in counts.most_common(16))}"
            )
    return [module for module in tree.names if type(module).__name__ in class_names]


def _chosen_by(tree: _Tree, choose: Callable[[nn.Module], Iterable[nn.Module]]) -> list[nn.Module]:
    """Call the user's function and list the modules that it returns; raise for one that is not inside the root."""
    returned = choose(tree.root)
    chosen = list(returned) if isinstance(returned, Iterable) else [returned]
    for module in chosen:
        if not isinstance(module, nn.Module) or module not in tree.names or module is tree.root:
            found = f"a {type(module).__name__}" if isinstance(module, nn.Module) else repr(module)
            raise PartitionError(
                f"the callable given as units must return modules inside {type(tree.root).__name__}, got {found},"
                " which is not one of them"
            )
    return chosen


def _chosen_pieces(tree: _Tree, chosen: Sequence[nn.Module]) -> list[_Piece]:
    """Make a piece of each outermost chosen module; raise if none of them can be entered and owns parameters."""
    wanted = set(chosen)
    pieces = [_Piece.of(tree, module, is_block=True) for module in tree.outermost(tree.root, wanted)]
    if not pieces:
        raise PartitionError(
            f"units chose {len(wanted)} modules of {type(tree.root).__name__}, none of which can be entered and owns "
            'parameters; choose modules that do, or units="auto"'
        )
    return pieces
