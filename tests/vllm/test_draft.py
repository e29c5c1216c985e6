"""Speculative decoding: the draft's weights are an entry of their own."""

from __future__ import annotations


def test_a_draft_model(run, checkpoints, private_socket):
    from torchwcache.cache import DaemonCache

    speculative = {"model": str(checkpoints("small")), "num_speculative_tokens": 2, "method": "draft_model"}
    options = {"speculative_config": speculative}
    without, _ = run(checkpoints("dense"), options={**options, "load_format": "auto"})
    first, lines = run(checkpoints("dense"), options=options)
    assert "target: miss" in lines
    assert "draft: miss" in lines
    second, lines = run(checkpoints("dense"), options=options)
    assert "target: hit" in lines
    assert "draft: hit" in lines
    assert first == second == without
    assert sorted(entry.slot.split("|")[1] for entry in DaemonCache(private_socket, start=False).entries()) == ["draft", "target"]
    _, lines = run(checkpoints("dense"))
    assert "target: hit" in lines  # the target is the same with and without a draft
