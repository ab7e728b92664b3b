"""What users do with autograd."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import torch
from hazard_blocks import WIDTH, Function, Mlp, batch, mlps
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

THEME = "autograd"


def _listed(gradients: Any) -> Found:
    return {f"gradient {k}": g.detach() for k, g in enumerate(gradients)}


@hazard(THEME)
def autograd_grad(h: Setting) -> Found:
    """torch.autograd.grad"""
    net, x = h.net(mlps(4)), batch()
    return _listed(torch.autograd.grad(square(net(x)), [x, *net.parameters()]))


@hazard(THEME)
def partial_gradients(h: Setting) -> Found:
    """the gradients of one block in the middle alone"""
    blocks = mlps(6)
    return _listed(torch.autograd.grad(square(h.net(blocks)(batch())), list(blocks[3].parameters())))


@hazard(THEME)
def retained_graph(h: Setting) -> Found:
    """backward twice with retain_graph"""
    net, x = h.net(mlps(4)), batch()
    loss = square(net(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return collect(net, gradient_of_input=torch.zeros(()) if x.grad is None else x.grad)


@hazard(THEME, undisturbed=True)
def backward_twice(h: Setting) -> Found:
    """backward twice without retain_graph, which plain autograd refuses"""
    net = h.net(mlps(4))
    loss = square(net(batch()))
    loss.backward()
    if h.disturbed:
        loss.backward()
    return collect(net)


@hazard(THEME)
def two_losses(h: Setting) -> Found:
    """two losses of one forward pass, one after the other"""
    net = h.net(mlps(4))
    y = net(batch())
    y.sum().backward(retain_graph=True)
    square(y).backward()
    return collect(net)


@hazard(THEME)
def second_order(h: Setting) -> Found:
    """a gradient penalty (create_graph)"""
    net, x = h.net(mlps(4)), batch()
    (gradient,) = torch.autograd.grad(square(net(x)), x, create_graph=True)
    gradient.square().sum().backward()
    return collect(net, penalised=gradient.detach())


@hazard(THEME)
def hessian_vector_product(h: Setting) -> Found:
    """a Hessian-vector product in the parameters"""
    net, x = h.net(mlps(3 + 1)), batch()
    parameters = list(net.parameters())
    first = torch.autograd.grad(square(net(x)), parameters, create_graph=True)
    return _listed(torch.autograd.grad(sum((g.sum() for g in first), torch.zeros(())), parameters))


@hazard(THEME)
def tensor_hooks(h: Setting) -> Found:
    """hooks on a parameter and on the output that change the gradient"""
    blocks = mlps(4)
    next(blocks[1].parameters()).register_hook(lambda g: g * 3)

    def loss(y: Tensor) -> Tensor:
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return square(y)

    return step(h.net(blocks), batch(), loss=loss)


@hazard(THEME)
def full_backward_hook(h: Setting) -> Found:
    """register_full_backward_hook on a block, which halves the gradient of its input"""
    blocks = mlps(4)
    blocks[1].register_full_backward_hook(lambda m, gx, gy: (gx[0] * 0.5,))  # type: ignore[index]
    return step(h.net(blocks), batch())


@hazard(THEME)
def forward_hooks(h: Setting) -> Found:
    """forward hooks that change a block's input and output"""
    blocks = mlps(4)
    blocks[1].register_forward_hook(lambda m, x, y: y * 0.5)
    blocks[2].register_forward_pre_hook(lambda m, x: (x[0] + 1,))
    return step(h.net(blocks), batch())


@hazard(THEME)
def activations_captured(h: Setting) -> Found:
    """an activation kept by a hook and used in the loss (distillation)"""
    blocks, seen = mlps(4), Found()
    blocks[2].register_forward_hook(lambda m, x, y: seen.update(activation=y))
    return step(h.net(blocks), batch(), loss=lambda y: square(y) + square(seen["activation"]))


@hazard(THEME)
def activations_appended(h: Setting) -> Found:
    """a hook that appends activations to a list, whose first is used in the loss"""
    blocks, seen = mlps(4), []
    blocks[2].register_forward_hook(lambda m, x, y: seen.append(y))
    return step(h.net(blocks), batch(), loss=lambda y: square(y) + square(seen[0]))


@hazard(THEME)
def anomaly_mode(h: Setting) -> Found:
    """anomaly mode"""
    with torch.autograd.set_detect_anomaly(True):
        return step(h.net(mlps(4)), batch())


@hazard(THEME)
def detached_inside(h: Setting) -> Found:
    """detach inside a block"""
    return step(h.net([nn.Sequential(Mlp(), Function(lambda x: x * x.detach().sigmoid())) for _ in range(4)]), batch())


@hazard(THEME)
def no_grad_inside(h: Setting) -> Found:
    """a no_grad region inside a block"""

    def scaled(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.norm(dim=-1, keepdim=True)
        return x / (1 + scale)

    return step(h.net([nn.Sequential(Mlp(), Function(scaled)) for _ in range(4)]), batch())


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, twice: bool) -> Tensor:
        ctx.twice = twice
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * (ctx.saved_tensors[0] if ctx.twice else x).cos(), None


@hazard(THEME)
def own_function(h: Setting) -> Found:
    """an autograd.Function of one's own"""
    return step(h.net([nn.Sequential(Mlp(), Function(lambda x: _Sine.apply(x, False))) for _ in range(4)]), batch())


@hazard(THEME)
def own_function_reading_twice(h: Setting) -> Found:
    """an autograd.Function whose backward reads ctx.saved_tensors twice"""
    return step(h.net([nn.Sequential(Mlp(), Function(lambda x: _Sine.apply(x, True))) for _ in range(4)]), batch())


@hazard(THEME)
def gradient_taken_inside(h: Setting) -> Found:
    """a block that takes a gradient itself: f = −∇E"""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    return step(h.net([Energy() for _ in range(4)]), batch())


@hazard(THEME)
def checkpoint_inside(h: Setting) -> Found:
    """torch.utils.checkpoint inside a block"""

    class Inside(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return step(h.net([Inside() for _ in range(4)]), batch())


@hazard(THEME)
def checkpoint_around(h: Setting) -> Found:
    """torch.utils.checkpoint around the whole network"""
    net = h.net([nn.Sequential(Mlp(), nn.Dropout(0.3)) for _ in range(4)])
    return step(net, batch(), loss=lambda y: square(y)) | step(
        Function(lambda x: checkpoint(net, x, use_reentrant=False)), batch()
    )


@hazard(THEME)
def network_inside_a_block(h: Setting) -> Found:
    """such a network inside a block of another"""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = h.net(mlps(2))

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * self.net(x)

    return step(h.net([Inner() for _ in range(4)]), batch())


@hazard(THEME)
def network_twice_in_one_graph(h: Setting) -> Found:
    """the network applied to its own output"""
    net = h.net(mlps(4))
    return step(Function(lambda x: net(net(x))), batch()) | collect(net)


@hazard(THEME)
def offloaded(h: Setting) -> Found:
    """forward under save_on_cpu"""
    net, x = h.net(mlps(4)), batch()
    with save_on_cpu():
        y = net(x)
    square(y).backward()
    return collect(net)


@hazard(THEME)
def saved_tensor_hooks(h: Setting) -> Found:
    """forward under saved-tensor hooks that copy"""
    net, x = h.net(mlps(4)), batch()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = net(x)
    square(y).backward()
    return collect(net)


@hazard(THEME)
def vmap_over_the_network(h: Setting) -> Found:
    """torch.func.vmap of the network over the batch"""
    net = h.net(mlps(4))
    y = torch.func.vmap(net)(batch())
    square(y).backward()
    return collect(net, output=y.detach())


@hazard(THEME)
def per_sample_gradients(h: Setting) -> Found:
    """per-sample gradients by torch.func.vmap(grad)"""
    net = h.net(mlps(4))
    parameters = {n: p.detach() for n, p in net.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return square(torch.func.functional_call(net, p, (x[None],)))

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch().detach())
    return _listed(found.values())


@hazard(THEME)
def func_grad(h: Setting) -> Found:
    """torch.func.grad"""
    net = h.net(mlps(4))
    return {"gradient": torch.func.grad(lambda x: square(net(x)))(batch().detach())}


@hazard(THEME)
def forward_mode(h: Setting) -> Found:
    """forward-mode derivatives (torch.func.jvp)"""
    net, x = h.net(mlps(4)), batch().detach()
    y, tangent = torch.func.jvp(net, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    return {"output": y.detach(), "gradient": tangent.detach()}


@hazard(THEME)
def vectorised_jacobian(h: Setting) -> Found:
    """a vectorised Jacobian"""
    net = h.net(mlps(4))
    return {"gradient": torch.autograd.functional.jacobian(net, batch(2).detach(), vectorize=True)}


@hazard(THEME)
def batched_gradients(h: Setting) -> Found:
    """autograd.grad with is_grads_batched"""
    net, x = h.net(mlps(4)), batch()
    y = net(x)
    return {"gradient": torch.autograd.grad(y, x, torch.randn(4, *y.shape), is_grads_batched=True)[0]}


@hazard(THEME)
def deep_copy_between(h: Setting) -> Found:
    """deepcopy between forward and backward; the copy trains too"""
    net, x = h.net(mlps(4)), batch()
    y = net(x)
    twin = copy.deepcopy(net)
    square(y).backward()
    square(twin(batch())).backward()
    return collect(net) | {f"twin, {k}": t for k, t in collect(twin).items()}


@hazard(THEME)
def saved_and_loaded_between(h: Setting) -> Found:
    """torch.save between forward and backward; the loaded one trains on"""
    net, x = h.net([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]), batch()
    y, buffer = net(x), io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    square(y).backward()
    square(loaded(batch())).backward()
    return collect(net) | {f"loaded, {k}": t for k, t in collect(loaded).items()}


@hazard(THEME)
def backward_in_another_thread(h: Setting) -> Found:
    """backward in another thread than forward"""
    net = h.net([nn.Sequential(Mlp(), nn.Dropout(0.3)) for _ in range(4)])
    loss = square(net(batch()))
    _in_threads([loss.backward])
    return collect(net)


@hazard(THEME)
def two_threads(h: Setting) -> Found:
    """two threads that train two networks at the same time"""
    nets, inputs = [h.net(mlps(6)) for _ in range(2)], [batch() for _ in range(2)]

    def train(k: int) -> None:
        for _ in range(10):
            square(nets[k](inputs[k])).backward()

    _in_threads([lambda: train(0), lambda: train(1)])
    return {f"{k}: {name}": t for k, net in enumerate(nets) for name, t in collect(net).items()}


def _in_threads(jobs: list[Any]) -> None:
    failed: list[BaseException] = []

    def run(job: Any) -> None:
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
