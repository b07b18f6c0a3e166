"""Arguments of constructors and calls: their forms, and objects of torch among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.judge.channel import scalar_page
from workers.judge.channel.arguments import ArgumentsError, check, of_constructor, put_together, take_apart
from workers.judge.channel.objects import Built, Named, as_data, as_object


class Sized(torch.nn.Module):
    def __init__(self, size: Any = 1, bias: Any = True) -> None:
        super().__init__()


class Bare(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("returned", "model", "arguments"),
    [
        ([4, True], Sized, [4, True]),
        ({"size": 4}, Sized, {"size": 4}),
        ([[], {"size": 4}], Sized, ([], {"size": 4})),
        ([[4], {"bias": False}], Sized, ([4], {"bias": False})),
        ([[], {}], Bare, ([], {})),
        (((), {}), Bare, ([], {})),
        ([[4], {}], Sized, [[4], {}]),
        ([[4, 5], {"gain": 2}], Sized, [[4, 5], {"gain": 2}]),
    ],
)
def test_a_constructor_gets_its_arguments(returned: Any, model: Any, arguments: Any) -> None:
    assert of_constructor(returned, model) == arguments


def test_objects_of_torch_survive_the_way() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.GELU())
    generator = torch.Generator().manual_seed(7)
    given = [network, torch.nn.functional.silu, [torch.nn.ReLU, torch.bfloat16], generator]
    x = torch.randn(2, 3, 5, 5)
    arrangement, tensors = take_apart(given)
    assert check(scalar_page.decode(scalar_page.encode(arrangement))) == len(tensors) == 7
    for read, parts in ((arrangement, tensors), (scalar_page.decode(scalar_page.encode(given)), [])):
        made, _ = put_together(read, parts)
        assert torch.equal(made[0](x), network(x))
        assert made[1:3] == given[1:3]
        assert torch.equal(torch.rand(3, generator=made[3]), torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_other_objects_are_refused_by_name() -> None:
    for value, reason in (
        (Bare(), "Bare, which only the problem's process has"),
        (lambda: 1, "<lambda>, which only"),
        ((n for n in range(3)), "a Python generator, which can be used only once"),
        ({1}, "a value of the type set"),
    ):
        with pytest.raises(ArgumentsError, match=reason):
            take_apart([value])
    assert as_data(torch.nn.functional.gelu) == Named("torch.nn.functional.gelu")
    for name in ("os.system", "torch.version", "torch.os.system", "gelu", ""):
        for data in (Named(name), Built(name, {})):
            with pytest.raises(ValueError, match="is no function or class of torch"):
                as_object(data)
