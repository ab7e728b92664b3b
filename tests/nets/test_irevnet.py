"""The inverse of a whole i-RevNet, to the bit; training on the tape."""

import pytest
import torch

import retrograde as rg
from problems import same_in_every_mode
from retrograde.nets.irevnet import IRevNet
from retrograde.reverse.coupling import squeeze, unsqueeze


class Modes(IRevNet):
    """With the memory mode where the shared test looks for it."""

    memory = property(lambda self: self.couplings.memory, lambda self, mode: setattr(self.couplings, "memory", mode))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("stages", "first", "padding", "size"), [([3], 2, 0, 6), ([2, 3, 2], 2, 0, 8), ([2, 1], 1, 5, 4), ([2, 2], 4, 2, 8)]
)
def test_images_come_back_bit_for_bit(mode: str, stages: list[int], first: int, padding: int, size: int) -> None:
    net = IRevNet(stages, channels=3, classes=4, first=first, padding=padding).train(mode == "train")
    image = torch.randint(256, (2, 3, size, size)) / 256
    state = net.encode(image)
    assert state.x.shape[1] == (3 * first**2 + padding) * 4 ** (len(stages) - 1)
    assert torch.equal(net.inverse(state), image)


def test_deep_and_other_floats() -> None:
    net = IRevNet([6, 16, 12], channels=1, classes=4).eval()
    image = torch.randn(2, 1, 16, 16)
    state = net.encode(image)
    back = net.inverse(state)
    assert torch.equal(back, state.fixed.decode(state.fixed.encode(image), image.dtype))
    assert (back - image).abs().max() <= 2.0 ** -(state.fixed.bits + 1)


def test_gradients_are_those_of_stored_activations() -> None:
    net = Modes([2, 2], channels=3, classes=4, verify="strict")
    found = same_in_every_mode(net, torch.randn(2, 3, 8, 8, requires_grad=True))
    assert found["input"].any()
    assert found["couplings.blocks.0.2.weight"].any()


def test_it_trains_and_still_inverts() -> None:
    net = IRevNet([2, 2], channels=1, classes=2, memory="reverse", verify="strict")
    image = torch.randint(256, (32, 1, 8, 8)) / 256
    label = (image[:, 0, :4].mean((1, 2)) > image[:, 0, 4:].mean((1, 2))).long()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 5
    net.eval()
    assert torch.equal(net.inverse(net.encode(image)), image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("r", [1, 2, 3])
def test_squeeze_is_a_permutation(dtype: torch.dtype, r: int) -> None:
    x = torch.arange(2 * 3 * 6 * 12).view(2, 3, 6, 12).to(dtype)
    y = squeeze(x, r)
    assert y.shape == (2, 3 * r * r, 6 // r, 12 // r)
    assert torch.equal(unsqueeze(y, r), x)
    assert torch.equal(y.flatten().sort().values, x.flatten())


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="27, which is odd"):
        IRevNet([1], channels=3, first=3)
    with pytest.raises(ValueError, match="stages is empty"):
        IRevNet([])
    with pytest.raises(ValueError, match=r"\(N, 3, H, W\); got \(1, 1, 8, 8\)"):
        IRevNet([1])(torch.ones(1, 1, 8, 8))
    with pytest.raises(ValueError, match="divisible by 2"):
        IRevNet([1, 1])(torch.ones(1, 3, 6, 6))
    with pytest.raises(rg.RangeOverflow, match="NaN"):
        IRevNet([1])(torch.full((1, 3, 4, 4), float("nan")))
    with pytest.raises(TypeError, match="floating-point"):
        IRevNet([1])(torch.ones(1, 3, 4, 4, dtype=torch.uint8))
