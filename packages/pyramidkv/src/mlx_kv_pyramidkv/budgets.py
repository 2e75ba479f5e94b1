"""How PyramidKV shares rows out among the layers."""

from __future__ import annotations


def layer_budgets(layers: int, budget: int, window: int, beta: int, prompt_length: int) -> list[int]:
    """Return the rows each layer keeps, the window included (arXiv 2406.02069, section 4.2).

    Beyond the window, rows run linearly from the first layer to the last, which has 1/beta of the average. They are
    whole numbers whose total is exactly layers * (budget - window): the line is floored, and what is missing goes to
    the largest fractions, of equal ones to the lower layer.

    Args:
        layers: compressed layers.
        budget: rows of a layer on average, the window included.
        window: newest rows, which every layer keeps.
        beta: how much steeper than uniform; at 1 every layer keeps the same.
        prompt_length: tokens of the prompt; a layer gets no more. Below `budget` nothing is dropped, and below
            2 * (budget - window) all layers keep the same.

    Raises:
        ValueError: if an argument is out of its range.
    """
    for name, value, least in (
        ("layers", layers, 1),
        ("window", window, 0),
        ("budget", budget, window),
        ("beta", beta, 1),
    ):
        if value < least:
            raise ValueError(f"[pyramidkv] expected {name} of at least {least}, got {value}")
    average = budget - window
    if prompt_length < budget:
        return [prompt_length] * layers
    if layers == 1 or prompt_length < 2 * average:
        return [budget] * layers
    least = average // beta
    most = 2 * average - least
    if most >= prompt_length - window:
        most = prompt_length - window
        least = 2 * average - most
    line = [divmod(most * (layers - 1) - (most - least) * layer, layers - 1) for layer in range(layers)]
    missing = layers * average - sum(whole for whole, _ in line)
    by_fraction = sorted(range(layers), key=lambda layer: (-line[layer][1], layer))
    rounded_up = set(by_fraction[:missing])
    return [window + whole + (layer in rounded_up) for layer, (whole, _) in enumerate(line)]
