"""How engines split a model's layers over pipeline stages where a document does not say: each by its own rule."""

from __future__ import annotations

__all__ = ["stage_layers"]


def stage_layers(rest: str, num_layers: int, num_stages: int, first: int = 0, last: int = 0) -> list[int]:
    """Return the layers of each stage, of which some may get none.

    rest: a preset's word for the rule. first, last: layers of the first and the last stage; 0: as the others.
    Raises ValueError where the engine's rule does not split so many layers over so many stages.
    """
    whole, more = divmod(num_layers, num_stages)
    if rest == "before_last":
        # vLLM: the stages before the last get one more each
        counts = [whole] * num_stages
        for nth in range(more):
            counts[-2 - nth] += 1
        return counts
    if rest == "last":
        # SGLang: the last stages get one more each
        return [whole + (stage >= num_stages - more) for stage in range(num_stages)]
    if rest == "with_ends":
        # torchtitan: what stands before and after the layers counts as one each
        if num_stages > num_layers + 2:
            raise ValueError(
                f"{num_layers} layers, with the embedding and the head, do not fill {num_stages} stages; "
                f"at most {num_layers + 2}, or write pipeline: {{layers: [...]}}"
            )
        whole, more = divmod(num_layers + 2, num_stages)
        counts = [whole + (stage < more) for stage in range(num_stages)]
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    inner = num_stages - (first > 0) - (last > 0)
    left = num_layers - first - last
    if left < 0 or (inner and left % inner) or (not inner and left):
        ways = " or options: {first_layers: ..., last_layers: ...}" if rest == "first_last" else ""
        raise ValueError(
            f"{num_layers} layers do not split evenly over {num_stages} stages; write pipeline: {{layers: [...]}}{ways}"
        )
    middle = [left // inner] * inner if inner else []
    return [first] * (first > 0) + middle + [last] * (last > 0)
