"""What one version of the weights consists of, tensor by tensor, so that "served" can be proved equal to "published".

Learner and engine describe their model by the same rule (`model_tensors`), hash the same bytes (`tensor_bytes`) and
fold the hashes in the same order (`combine`). Two models therefore have one combined checksum exactly if all their
tensors are bit-equal, whichever transport lay between. xxh3 guards against accidents (a torn copy, a stale tensor, a
mixed-up version), not against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl.weights.base import StagedWeights, WeightsError

FORMAT = 2
"""Version of the manifest's fields, of `tensor_bytes` and of `combine` together."""

ALIGNMENT = 64
"""Tensors start at multiples of it, in bytes: a cache line, and more than any dtype's own alignment."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class Form(NamedTuple):
    """What a tensor must look like to be loaded in another's place."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: its form, where its bytes lie, and their xxh3_64 (hex)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the data
    nbytes: int
    checksum: str  # "" where the version was published without

    @property
    def form(self) -> Form:
        return Form(self.name, self.dtype, self.shape)


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The version's tensors are not weights but the factors of an adapter (`adapter.py`), to be added to a model that
    engines have. What they make of it is what is served, and what is proved."""

    base: str  # combined checksum of that model in float32
    path: str  # what the learner calls it, for messages
    rank: int
    scale: float
    weights: tuple[str, ...]  # what is adapted, in the model's order
    transposed: tuple[str, ...] = ()  # those of them that lie [in, out]
    served: str = ""  # combined checksum of the whole model with the adapter added; "" = published unhashed


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version: its tensors in order, tied aliases (alias -> source, without bytes) and the combined checksum."""

    tensors: tuple[TensorSpec, ...]
    tied: dict[str, str]
    checksum: str
    format: int = FORMAT
    adapter: Adapter | None = None

    @property
    def served(self) -> str:
        """Combined checksum of what engines hold once they serve this version; "" = published unhashed."""
        return self.checksum if self.adapter is None else self.adapter.served

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the gaps between them."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def size(self) -> int:
        """Bytes from the start of the data to its end, gaps included: of the last tensor that has any."""
        return max((spec.offset + spec.nbytes for spec in self.tensors if spec.nbytes), default=0)


def model_tensors(model: torch.nn.Module) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
    """What distinguishes one version of `model` from another: parameters, persistent buffers, in state_dict order.

    Returns ([(name, tensor), ...], {alias: source}). Tensors are live (detached, no copies).
    """
    return distinct_tensors(model.state_dict())


def distinct_tensors(state: Mapping[str, object]) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
    """The same of a state_dict. A tensor that is the same memory, seen the same way, as an earlier one is its alias and
    not listed: a tied head has no bytes of its own."""
    tensors: list[tuple[str, torch.Tensor]] = []
    tied: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise WeightsError(f"{name} is a {type(value).__name__}, not a tensor: extra state cannot be published")
        tensor = value.detach()
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Empty tensors all lie at address 0 and are no aliases of each other.
        source = seen.setdefault(view, name) if tensor.numel() else name
        if source == name:
            tensors.append((name, tensor))
        else:
            tied[name] = source
    return tensors, tied


def check_publishable(name: str, tensor: torch.Tensor) -> None:
    """Raises WeightsError for a layout or dtype that has no plain bytes."""
    if tensor.layout != torch.strided or tensor.is_meta or dtype_name(tensor.dtype) not in DTYPES:
        raise WeightsError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; "
            f"dense tensors with memory and of one of these types can be published: {', '.join(DTYPES)}"
        )


def tensor_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order as a flat byte view. Copies only if not contiguous or not on the CPU.

    Raises WeightsError for a layout or dtype that has no plain bytes.
    """
    check_publishable(name, tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that comes in pieces: flat ones, which together are its elements in row-major order. It need not be
    whole anywhere but where it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[torch.Tensor]  # consumed once

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensors_in(data: NDArray[np.uint8] | torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors that lie in `data`, uint8 of any device. Not copied: they keep it."""
    whole = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        dtype = DTYPES[spec.dtype]
        if spec.nbytes:
            tensors[spec.name] = whole[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)
        else:  # it may lie behind the end
            tensors[spec.name] = torch.empty(spec.shape, dtype=dtype, device=whole.device)
    return tensors


def describe(name: str, tensor: torch.Tensor | Pieces, *, offset: int, checksum: str) -> TensorSpec:
    """The spec of `tensor`, whose bytes have this checksum and lie at `offset`."""
    return TensorSpec(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        offset=offset,
        nbytes=tensor.nbytes,
        checksum=checksum,
    )


def aligned(offset: int) -> int:
    """The next multiple of ALIGNMENT.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-offset // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def combine(checksums: Iterable[str]) -> str:
    """One checksum of a whole version: xxh3_64 over its tensors' hex checksums, in order."""
    whole = xxhash.xxh3_64()
    for checksum in checksums:
        whole.update(checksum.encode("ascii"))
    return whole.hexdigest()


def combined_checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """`combine` over live tensors: what StagedWeights.checksum is for the same bytes."""
    return combine(xxhash.xxh3_64_hexdigest(tensor_bytes(name, tensor)) for name, tensor in tensors)


def check(manifest: Manifest, where: str) -> None:
    """Check a manifest that came from outside in itself, before memory is taken or a byte is read by what it says:
    format, names, types, sizes, places, combined checksum. Raises WeightsError."""
    if manifest.format != FORMAT:
        raise WeightsError(
            f"{where}: manifest of format {manifest.format}, expected {FORMAT}; "
            "learner and collector must run the same version of asyncrl"
        )
    if len({spec.name for spec in manifest.tensors}) != len(manifest.tensors):
        raise WeightsError(f"{where}: the manifest names a tensor twice")
    end = 0
    for spec in manifest.tensors:
        if spec.dtype not in DTYPES:
            raise WeightsError(f"{where}: {spec.name} has type {spec.dtype!r}; known are {', '.join(DTYPES)}")
        if min(spec.shape, default=0) < 0 or spec.nbytes != math.prod(spec.shape) * DTYPES[spec.dtype].itemsize:
            raise WeightsError(
                f"{where}: {spec.name} is {spec.dtype}{list(spec.shape)} and cannot have {spec.nbytes} bytes"
            )
        if spec.offset != aligned(end):
            raise WeightsError(f"{where}: {spec.name} at {spec.offset}, expected {aligned(end)}: no gap, no overlap")
        end = spec.offset + spec.nbytes
    if manifest.checksum and (found := combine(spec.checksum for spec in manifest.tensors)) != manifest.checksum:
        raise WeightsError(f"{where}: combined checksum {manifest.checksum} announced, but its tensors give {found}")


def compare(
    manifest: Manifest,
    found: Sequence[TensorSpec],
    *,
    tied: Mapping[str, str] | None = None,
    where: str = "these weights",
) -> None:
    """Check `found` against the manifest: names, order, types, shapes, bytes, and `tied` aliases if given.

    Raises WeightsError that names the tensors and, for each, expected and found.
    """
    compare_forms([spec.form for spec in manifest.tensors], [spec.form for spec in found], where=where)
    if tied is not None:
        _compare_tied(manifest.tied, tied, where)
    different = [
        f"{spec.name} (expected xxh3 {spec.checksum}, found {other.checksum})"
        for spec, other in zip(manifest.tensors, found, strict=True)
        if spec.checksum != other.checksum
    ]
    if different:
        raise WeightsError(f"{where}: {len(different)} of {len(found)} tensors differ: {_some(different)}")


def compare_forms(expected: Sequence[Form], found: Sequence[Form], *, where: str) -> None:
    """Check names, order, dtypes and shapes. Raises WeightsError naming the tensors, expected and found."""
    by_name, names = {form.name: form for form in expected}, [form.name for form in found]
    problems: list[str] = []
    if missing := sorted(by_name.keys() - set(names)):
        problems.append(f"missing {_some(missing)}")
    if extra := sorted(set(names) - by_name.keys()):
        problems.append(f"unexpected {_some(extra)}")
    wrong = [
        f"{form.name} (expected {_show(by_name[form.name])}, found {_show(form)})"
        for form in found
        if form.name in by_name and form != by_name[form.name]
    ]
    if wrong:
        problems.append(f"another type or shape: {_some(wrong)}")
    if not problems and names != [form.name for form in expected]:
        at = next(i for i, (form, name) in enumerate(zip(expected, names, strict=False)) if form.name != name)
        problems.append(f"another order: position {at} should be {expected[at].name}, is {names[at]}")
    if problems:
        raise WeightsError(f"{where}: {'; '.join(problems)}")


def check_fits(model: torch.nn.Module, staged: StagedWeights) -> None:
    """Check, before anything is overwritten, that `staged` is exactly what `model` consists of: names, order, types,
    shapes, ties. Raises WeightsError."""
    tensors, tied = model_tensors(model)
    where = f"weights {tuple(staged.weights)} do not fit the served model"
    compare_forms(
        [form(name, t) for name, t in tensors], [form(name, t) for name, t in staged.tensors.items()], where=where
    )
    check_tied(tied, staged)


def check_tied(tied: Mapping[str, str], staged: StagedWeights) -> None:
    """Check that `staged` has the ties of the served model. Raises WeightsError."""
    _compare_tied(tied, staged.tied, f"weights {tuple(staged.weights)} do not fit the served model")


def verify_served(model: torch.nn.Module, checksum: str) -> None:
    """Prove that the live `model` is, bit for bit, the version with this combined checksum. Raises WeightsError."""
    tensors, _ = model_tensors(model)
    found = combined_checksum(tensors)
    if found != checksum:
        raise WeightsError(f"the served model has checksum {found}, announced was {checksum}: it is another version")


def form(name: str, tensor: torch.Tensor) -> Form:
    """What `tensor` looks like."""
    return Form(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def _compare_tied(expected: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    if expected != found:
        raise WeightsError(f"{where}: expected tied tensors {dict(expected)}, found {dict(found)}")


def _show(form: Form) -> str:
    return f"{form.dtype}{list(form.shape)}"


def _some(items: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
