"""What users do with autograd."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from hazard_blocks import WIDTH, Function, Mlp, Own, batch, dense, mlps, several, then
from hazard_registry import Found, Theme, collect, given, listed, square, step, undisturbed
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def scaled(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.norm(dim=-1, keepdim=True)
    return x / (1 + scale)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, twice: bool) -> Tensor:
        ctx.twice = twice
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * (ctx.saved_tensors[0] if ctx.twice else x).cos(), None


class Energy(nn.Module):
    """f = −∇E."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Inner(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.net(x)


def dropping() -> list[nn.Module]:
    return several(lambda: nn.Sequential(Mlp(), nn.Dropout(0.3)))


def forward_within(h: Theme, context: Any) -> Found:
    """A step whose forward pass alone is within a context."""
    net, x = h.net(mlps()), batch()
    with context:
        y = net(x)
    square(y).backward()
    return collect(net)


def in_threads(*jobs: Callable[[], Any]) -> None:
    failed: list[BaseException] = []

    def run(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


class Autograd(Theme):
    theme = "autograd"

    def autograd_grad(self) -> Found:
        """torch.autograd.grad"""
        net, x = self.net(mlps()), batch()
        return listed(torch.autograd.grad(square(net(x)), [x, *net.parameters()]))

    def partial_gradients(self) -> Found:
        """the gradients of one block in the middle alone"""
        blocks = mlps(6)
        return listed(torch.autograd.grad(square(self.net(blocks)(batch())), list(blocks[3].parameters())))

    def retained_graph(self) -> Found:
        """backward twice with retain_graph"""
        net, x = self.net(mlps()), batch()
        loss = square(net(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return collect(net, gradient_of_input=given(x))

    @undisturbed
    def backward_twice(self) -> Found:
        """backward twice without retain_graph, which plain autograd refuses"""
        net = self.net(mlps())
        loss = square(net(batch()))
        loss.backward()
        if self.disturbed:
            loss.backward()
        return collect(net)

    def two_losses(self) -> Found:
        """two losses of one forward pass, one after the other"""
        net = self.net(mlps())
        y = net(batch())
        y.sum().backward(retain_graph=True)
        square(y).backward()
        return collect(net)

    def second_order(self) -> Found:
        """a gradient penalty (create_graph)"""
        net, x = self.net(mlps()), batch()
        (gradient,) = torch.autograd.grad(square(net(x)), x, create_graph=True)
        gradient.square().sum().backward()
        return collect(net, penalised=gradient.detach())

    def hessian_vector_product(self) -> Found:
        """a Hessian-vector product in the parameters"""
        net, x = self.net(mlps()), batch()
        parameters = list(net.parameters())
        first = torch.autograd.grad(square(net(x)), parameters, create_graph=True)
        return listed(torch.autograd.grad(sum((g.sum() for g in first), torch.zeros(())), parameters))

    def tensor_hooks(self) -> Found:
        """hooks on a parameter and on the output that change the gradient"""
        blocks = mlps()
        next(blocks[1].parameters()).register_hook(lambda g: g * 3)

        def loss(y: Tensor) -> Tensor:
            y.register_hook(lambda g: g.clamp(-0.01, 0.01))
            return square(y)

        return self.step(blocks, loss=loss)

    def full_backward_hook(self) -> Found:
        """register_full_backward_hook on a block, which halves the gradient of its input"""
        blocks = mlps()
        blocks[1].register_full_backward_hook(lambda m, gx, gy: (gx[0] * 0.5,))
        return self.step(blocks)

    def forward_hooks(self) -> Found:
        """forward hooks that change a block's input and output"""
        blocks = mlps()
        blocks[1].register_forward_hook(lambda m, x, y: y * 0.5)
        blocks[2].register_forward_pre_hook(lambda m, x: (x[0] + 1,))
        return self.step(blocks)

    def activations_captured(self) -> Found:
        """an activation kept by a hook and used in the loss (distillation)"""
        blocks, seen = mlps(), Found()
        blocks[2].register_forward_hook(lambda m, x, y: seen.update(activation=y))
        return self.step(blocks, loss=lambda y: square(y) + square(seen["activation"]))

    def activations_appended(self) -> Found:
        """a hook that appends activations to a list, whose first is used in the loss"""
        blocks, seen = mlps(), []
        blocks[2].register_forward_hook(lambda m, x, y: seen.append(y))
        return self.step(blocks, loss=lambda y: square(y) + square(seen[0]))

    def anomaly_mode(self) -> Found:
        """anomaly mode"""
        with torch.autograd.set_detect_anomaly(True):
            return self.step(mlps())

    def detached_inside(self) -> Found:
        """detach inside a block"""
        return self.step(several(lambda: then(lambda x: x * x.detach().sigmoid())))

    def no_grad_inside(self) -> Found:
        """a no_grad region inside a block"""
        return self.step(several(lambda: then(scaled)))

    def own_function(self) -> Found:
        """an autograd.Function of one's own"""
        return self.step(several(lambda: then(lambda x: Sine.apply(x, False))))

    def own_function_reading_twice(self) -> Found:
        """an autograd.Function whose backward reads ctx.saved_tensors twice"""
        return self.step(several(lambda: then(lambda x: Sine.apply(x, True))))

    def gradient_taken_inside(self) -> Found:
        """a block that takes a gradient itself: f = −∇E"""
        return self.step(several(Energy))

    def checkpoint_inside(self) -> Found:
        """torch.utils.checkpoint inside a block"""
        return self.step(several(lambda: Own(lambda block, x: checkpoint(block.f, x, use_reentrant=False))))

    def checkpoint_around(self) -> Found:
        """torch.utils.checkpoint around the whole network"""
        net = self.net(dropping())
        return step(net) | step(Function(lambda x: checkpoint(net, x, use_reentrant=False)))

    def network_inside_a_block(self) -> Found:
        """such a network inside a block of another"""
        return self.step(several(lambda: Inner(self.net(mlps(2)))))

    def network_twice_in_one_graph(self) -> Found:
        """the network applied to its own output"""
        net = self.net(mlps())
        return step(Function(lambda x: net(net(x)))) | collect(net)

    def offloaded(self) -> Found:
        """forward under save_on_cpu"""
        return forward_within(self, save_on_cpu())

    def saved_tensor_hooks(self) -> Found:
        """forward under saved-tensor hooks that copy"""
        return forward_within(self, saved_tensors_hooks(lambda t: t.clone(), lambda t: t))

    def vmap_over_the_network(self) -> Found:
        """torch.func.vmap of the network over the batch"""
        net = self.net(mlps())
        y = torch.func.vmap(net)(batch())
        square(y).backward()
        return collect(net, output=y.detach())

    def per_sample_gradients(self) -> Found:
        """per-sample gradients by torch.func.vmap(grad)"""
        net = self.net(mlps())
        parameters = {n: p.detach() for n, p in net.named_parameters()}

        def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return square(torch.func.functional_call(net, p, (x[None],)))

        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch().detach())
        return listed(found.values())

    def func_grad(self) -> Found:
        """torch.func.grad"""
        net = self.net(mlps())
        return {"gradient": torch.func.grad(lambda x: square(net(x)))(batch().detach())}

    def forward_mode(self) -> Found:
        """forward-mode derivatives (torch.func.jvp)"""
        net, x = self.net(mlps()), batch().detach()
        y, tangent = torch.func.jvp(net, (x,), (torch.ones_like(x),))  # type: ignore[misc]
        return {"output": y.detach(), "gradient": tangent.detach()}

    def vectorised_jacobian(self) -> Found:
        """a vectorised Jacobian"""
        net = self.net(mlps())
        return {"gradient": torch.autograd.functional.jacobian(net, batch(2).detach(), vectorize=True)}

    def batched_gradients(self) -> Found:
        """autograd.grad with is_grads_batched"""
        net, x = self.net(mlps()), batch()
        y = net(x)
        return {"gradient": torch.autograd.grad(y, x, torch.randn(4, *y.shape), is_grads_batched=True)[0]}

    def deep_copy_between(self) -> Found:
        """deepcopy between forward and backward; the copy trains too"""
        net, x = self.net(mlps()), batch()
        y = net(x)
        twin = copy.deepcopy(net)
        square(y).backward()
        square(twin(batch())).backward()
        return collect(net) | {f"twin, {k}": t for k, t in collect(twin).items()}

    def saved_and_loaded_between(self) -> Found:
        """torch.save between forward and backward; the loaded one trains on"""
        net, x = self.net(several(dense)), batch()
        y, buffer = net(x), io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        square(y).backward()
        square(loaded(batch())).backward()
        return collect(net) | {f"loaded, {k}": t for k, t in collect(loaded).items()}

    def backward_in_another_thread(self) -> Found:
        """backward in another thread than forward"""
        net = self.net(dropping())
        in_threads(square(net(batch())).backward)
        return collect(net)

    def two_threads(self) -> Found:
        """two threads that train two networks at the same time"""
        nets, inputs = several(lambda: self.net(mlps(6)), 2), [batch() for _ in range(2)]

        def train(k: int) -> None:
            for _ in range(10):
                square(nets[k](inputs[k])).backward()

        in_threads(lambda: train(0), lambda: train(1))
        return {f"{k}: {name}": t for k, net in enumerate(nets) for name, t in collect(net).items()}
