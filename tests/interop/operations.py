"""What both kinds of rank perform, and the answers they must get. ``array`` is numpy or torch, which agree here.

An operation is {"op": KIND, "count": elements of float32, ...}: allreduce, allgather, barrier, those of ROOTED with
"root", and send with "source", "target" and "tag".
"""

ROOTED = ("broadcast", "reduce", "gather", "scatter")
_PERIOD = 1009
_STEP = 7


def pattern(array, count, rank):
    """What ``rank`` contributes: small whole numbers, so that sums are exact in float32."""
    return array.arange(count) % _PERIOD + _STEP * rank


def expected(array, operation, size):
    """What every rank that receives something must hold afterwards."""
    kind, count = operation["op"], operation["count"]
    if kind in ("allreduce", "reduce"):
        return pattern(array, count, 0) * size + _STEP * size * (size - 1) // 2
    if kind in ("allgather", "gather"):
        together = [pattern(array, count, rank) for rank in range(size)]
        return array.concatenate(together) if hasattr(array, "concatenate") else array.cat(together)
    if kind == "scatter":  # a rank that got its own part holds that of rank 0 after the shift in the rank's code
        return pattern(array, count, 0)
    return pattern(array, count, operation["source"] if kind == "send" else operation.get("root", 0))


def mixed_traffic(size, largest):
    """Every operation from 4 bytes to ``largest`` bytes, odd sizes, every root, every ordered pair of ranks."""
    counts = [1, 3, 255, 4_097, 262_147]
    script = [{"op": "allreduce", "count": count} for count in [*counts, largest // 4 | 1]]
    for count in counts:
        script += [{"op": kind, "count": count, "root": root} for kind in ROOTED for root in range(size)]
        script.append({"op": "allgather", "count": count})
        script += [
            {"op": "send", "count": count, "source": source, "target": target, "tag": 1000 + source}
            for source in range(size)
            for target in range(size)
            if source != target
        ]
        script.append({"op": "barrier", "count": 1})
        if count == counts[-1] and size == 2:
            script += [
                {"op": kind, "count": largest // 4 | 1, "root": 1} for kind in ("broadcast", "reduce", "allgather")
            ]
            script.append({"op": "send", "count": largest // 4 | 1, "source": 1, "target": 0, "tag": 7})
    return script
