"""Block-wise FP8, as the checkpoints of DeepSeek-V3 and Qwen3 hold it: the arithmetic.

A weight of ``(out, in)`` is cut into blocks of ``(rows, columns)``, usually 128 x 128; the blocks at the right and lower edge may
be smaller. Each block has one float32 scale, and ``dequantized = weight * scale``. By the convention of those checkpoints the
scales are called ``weight_scale_inv``, of shape ``(ceil(out / rows), ceil(in / columns))``: the inverse of the factor that the
weights were multiplied with.

Source: DeepSeek-V3, ``inference/kernel.py`` (``weight_dequant``) and section 3.3 of its technical report.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["BLOCK", "FLOAT8", "check_block", "dequantize_block_fp8", "grid_of", "quantize_block_fp8", "rows_at_once"]

BLOCK = (128, 128)
"""The usual block."""
FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_SCALE_DTYPES = (torch.float32, torch.bfloat16)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AT_ONCE_NBYTES = 16 << 20


def check_block(block: object, shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Two positive integers, neither larger than the weight's own dimension.

    Args:
        block: Rows and columns.
        shape: Of the weight; only the last two dimensions count.

    Returns:
        The block as a tuple.

    Raises:
        ValueError: It is anything else. A block that is larger than a weight is a sign that the two do not belong together.
    """
    if not isinstance(block, (tuple, list)) or len(block) != 2 or not all(type(size) is int and size >= 1 for size in block):
        raise ValueError(f"a block is two positive integers, (rows, columns), not {block!r}")
    rows, columns = block
    if rows > shape[-2] or columns > shape[-1]:
        raise ValueError(f"a block of {rows} x {columns} is larger than the weight of {shape[-2]} x {shape[-1]}")
    return rows, columns


def grid_of(shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight of this shape."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def rows_at_once(columns: int, block_rows: int) -> int:
    """How many rows of a weight are worked on at once: whole rows of blocks, a few MiB in float32."""
    return max(1, _AT_ONCE_NBYTES // (4 * max(1, columns) * block_rows)) * block_rows


def _check_weight(weight: torch.Tensor) -> None:
    if weight.dim() not in (2, 3) or weight.numel() == 0:
        raise ValueError(f"expected a weight of (out, in) or (experts, out, in), not of shape {tuple(weight.shape)}")


def quantize_block_fp8(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight. The same input gives the same bits, whatever the number of threads, and on a GPU as on a CPU.

    A block's scale is its largest finite magnitude divided by 448, the largest float8_e4m3fn. Every finite element comes back with
    an error of at most half a float8 step at its own magnitude, times the scale, but for what float32 rounds. At the edges:

    - a block of zeros has scale 1 and stays zero, with its signs;
    - a scale never falls below the smallest normal float32 (2**-126), so blocks of denormals keep what float8 can tell apart there;
    - NaN stays NaN, and infinities become NaN, since float8_e4m3fn has none; neither has an effect on any other element;
    - one huge outlier sets the scale of its block, where everything below ``outlier / 448 / 1024`` becomes zero; other blocks do
      not notice.

    Transformers' ``Fp8Quantize`` differs: it multiplies by a rounded reciprocal instead of dividing (an element in many thousands
    is rounded the other way), a NaN or infinity spoils its whole block or the scale, and weights with ragged edges are left as they
    are.

    Args:
        weight: ``(out, in)``, or ``(experts, out, in)``; float32, bfloat16 or float16.
        block: Rows and columns of a block, each at least 1 and at most the weight's.
        scale_dtype: float32, or bfloat16 as some checkpoints store it; the weights are divided by the rounded scale then.

    Returns:
        The float8_e4m3fn weight, and the scales (``weight_scale_inv``), one per block.

    Raises:
        ValueError: Shape or block do not fit.
        TypeError: The dtype is none of these.
    """
    _check_weight(weight)
    if weight.dtype not in _WEIGHT_DTYPES or scale_dtype not in _SCALE_DTYPES:
        raise TypeError(f"cannot quantize {weight.dtype} to block FP8 with scales of {scale_dtype}")
    block = check_block(block, weight.shape)
    source = weight.detach()
    quantized = torch.empty(source.shape, dtype=FLOAT8, device=source.device)
    scales = torch.empty(grid_of(source.shape, block), dtype=scale_dtype, device=source.device)
    matrices = zip(*(t.unbind() if t.dim() == 3 else (t,) for t in (source, quantized, scales)), strict=True)
    for matrix, to, scale in matrices:
        step = rows_at_once(matrix.shape[1], block[0])
        for start in range(0, matrix.shape[0], step):
            _quantize_rows(
                matrix[start : start + step], block, to[start : start + step], scale[start // block[0] :][: step // block[0]]
            )
    return quantized, scales


def _quantize_rows(rows: torch.Tensor, block: tuple[int, int], to: torch.Tensor, scale: torch.Tensor) -> None:
    count, width = rows.shape
    padded = F.pad(rows.float(), (0, -width % block[1], 0, -count % block[0]))
    tiles = padded.view(scale.shape[0], block[0], scale.shape[1], block[1])
    finite = tiles.isfinite()
    largest = torch.where(finite, tiles.abs(), 0.0).amax(dim=(1, 3))
    smallest = torch.finfo(torch.float32).tiny
    # By a tensor: CUDA turns a division by a Python number into a multiplication, which rounds differently.
    candidates = (largest / largest.new_full((), _LARGEST)).clamp(min=smallest)
    scale.copy_(torch.where(largest > 0, candidates, 1.0))
    # The cast does not saturate, so what rounding has put beyond the largest value is brought back first.
    scaled = (tiles / scale.float()[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    values = torch.where(finite, scaled, torch.nan).to(FLOAT8)
    to.copy_(values.view(padded.shape)[:count, :width])


def dequantize_block_fp8(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``weight * scale_inv``, multiplied in float32 and rounded to ``dtype`` once.

    Bit for bit what Transformers' ``Fp8Dequantize`` gives, wherever that accepts the shape.

    Args:
        weight: float8_e4m3fn, ``(out, in)`` or ``(experts, out, in)``.
        scale_inv: One scale per block.
        block: Rows and columns of a block.
        dtype: Of the result.

    Raises:
        ValueError: The scales do not fit the weight.
        TypeError: The weight is not float8_e4m3fn.
    """
    _check_weight(weight)
    if weight.dtype is not FLOAT8:
        raise TypeError(f"cannot dequantize {weight.dtype} as block FP8")
    block = check_block(block, weight.shape)
    if tuple(scale_inv.shape) != grid_of(weight.shape, block):
        raise ValueError(
            f"a weight of {tuple(weight.shape)} in blocks of {block[0]} x {block[1]} needs scales of "
            f"{grid_of(weight.shape, block)}, not {tuple(scale_inv.shape)}"
        )
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    matrices = zip(*(t.unbind() if t.dim() == 3 else (t,) for t in (weight.detach(), scale_inv.detach(), result)), strict=True)
    for matrix, scale, to in matrices:
        step = rows_at_once(matrix.shape[1], block[0])
        for start in range(0, matrix.shape[0], step):
            to[start : start + step] = dequantized_rows(matrix, scale, block, start, step)
    return result


def dequantized_rows(weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], start: int, count: int) -> torch.Tensor:
    """Some rows of a matrix in float32.

    Args:
        weight: ``(out, in)``.
        scale_inv: Its scales.
        block: Rows and columns of a block.
        start: The first row; a multiple of the block's rows.
        count: How many rows, as far as there are; a multiple of the block's rows.
    """
    values = weight[start : start + count].float()
    scale = scale_inv[start // block[0] :][: -(-count // block[0])].float()
    scale = scale.repeat_interleave(block[0], dim=0)[: values.shape[0]]
    whole = values.shape[1] // block[1]
    edge = whole * block[1]
    # Broadcast over a view of the weight: spreading the scales over the columns too would make a second matrix of its size.
    values[:, :edge].unflatten(1, (whole, block[1])).mul_(scale[:, :whole, None])  # type: ignore[no-untyped-call]
    if edge < values.shape[1]:
        values[:, edge:].mul_(scale[:, whole:])
    return values
