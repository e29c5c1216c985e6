"""In place of SGLang's kernel package, which has no CPU build on the package index: what the plain CPU path calls."""

__version__ = "0"


def assign_req_to_token_pool_cpu(requests, table, starts, ends, slots, *_rest):
    """Write down for each request, row ``requests[i]`` of ``table``, where its tokens ``starts[i]:ends[i]`` are kept."""
    taken = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = slots[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return missing
