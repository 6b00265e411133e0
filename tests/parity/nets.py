"""Two models, and the ways in which training loops use both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, normal, plainly

WIDTH = 32
PLACES: dict[str, dict[str, Any]] = {
    "roomy": {"device": CPU, "host_memory": "8MiB"},
    "tight": {"device": CPU, "host_memory": "300KiB"},
    "device": {"device": SIM, "device_memory": "160KiB", "host_memory": "400KiB"},
}
UPDATES = ["step", "backward", "next_forward"]
Nets = dict[str, nn.Module]


class Net(nn.Module):
    """Blocks between two layers, as most models have them."""

    def __init__(self, seed: int, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.last(x)
        return out


def preference(nets: Nets, optimizers: list[Any], number: int) -> list[torch.Tensor]:
    """DPO: a reference that is not trained reads the same batch."""
    chosen, rejected = normal(number, 6, WIDTH), normal(100 + number, 6, WIDTH)
    with torch.no_grad():
        before = nets["b"](chosen).mean(1) - nets["b"](rejected).mean(1)
    now = nets["a"](chosen).mean(1) - nets["a"](rejected).mean(1)
    loss = -nn.functional.logsigmoid(now - before).mean()
    loss.backward()
    return finish(optimizers, loss)


def distillation(nets: Nets, optimizers: list[Any], number: int) -> list[torch.Tensor]:
    """The teacher runs every other step only, after the student."""
    x = normal(number, 6, WIDTH)
    out = nets["a"](x)
    if number % 2:
        with torch.no_grad():
            target = nets["b"](x)
        loss = (out - target).square().mean()
    else:
        loss = out.square().mean()
    loss.backward()
    return finish(optimizers, loss)


def chained(nets: Nets, optimizers: list[Any], number: int) -> list[torch.Tensor]:
    """A text encoder and a U-Net: the gradient of one goes on into the other."""
    loss = nets["b"](nets["a"](normal(number, 6, WIDTH)) * 0.5).square().mean()
    loss.backward()
    return finish(optimizers, loss)


def finish(optimizers: list[Any], loss: torch.Tensor) -> list[torch.Tensor]:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach()]


def adversarial(nets: Nets, optimizers: list[Any], number: int) -> list[torch.Tensor]:
    """DCGAN's loop: what the generator's loss leaves in the discriminator is dropped."""
    generator, discriminator = nets["a"], nets["b"]
    real, noise = normal(number, 6, WIDTH), normal(100 + number, 6, WIDTH)
    discriminator.zero_grad()
    fake = generator(noise)
    judged = nn.functional.softplus(-discriminator(real)).mean()
    judged.backward()
    second = nn.functional.softplus(discriminator(fake.detach())).mean()
    second.backward()
    optimizers[1].step()
    generator.zero_grad()
    fooled = nn.functional.softplus(-discriminator(fake)).mean()
    fooled.backward()
    optimizers[0].step()
    return [judged.detach(), second.detach(), fooled.detach()]


def apart(nets: Nets, optimizers: list[Any], number: int) -> list[torch.Tensor]:
    """The other form: a second sample, and gradients that stay until just before a backward."""
    generator, discriminator = nets["a"], nets["b"]
    real, noise = normal(number, 6, WIDTH), normal(100 + number, 6, WIDTH)
    fooled = nn.functional.softplus(-discriminator(generator(noise))).mean()
    optimizers[0].zero_grad()
    fooled.backward()
    optimizers[0].step()
    with torch.no_grad():
        fake = generator(noise + 1)
    judged = nn.functional.softplus(-discriminator(real)) + nn.functional.softplus(
        discriminator(fake)
    )
    optimizers[1].zero_grad()
    judged.mean().backward()
    optimizers[1].step()
    return [fooled.detach(), judged.detach()]


def frozen_judge(nets: Nets, optimizers: list[Any], number: int) -> list[torch.Tensor]:
    """The discriminator is frozen while the generator learns."""
    generator, discriminator = nets["a"], nets["b"]
    discriminator.requires_grad_(False)
    optimizers[0].zero_grad()
    fooled = nn.functional.softplus(-discriminator(generator(normal(number, 6, WIDTH)))).mean()
    fooled.backward()
    optimizers[0].step()
    discriminator.requires_grad_(True)
    optimizers[1].zero_grad()
    judged = nn.functional.softplus(-discriminator(normal(100 + number, 6, WIDTH))).mean()
    judged.backward()
    optimizers[1].step()
    return [fooled.detach(), judged.detach()]


def adam(params: Any, *, plain: bool) -> Any:
    if plain:
        return plainly(overspill.optim.AdamW, params, lr=0.01)
    return torch.optim.AdamW(params, lr=0.01)


def sgd(params: Any, *, plain: bool) -> Any:
    if plain:
        return plainly(overspill.optim.SGD, params, lr=0.05, momentum=0.9)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def one(nets: Nets, *, plain: bool) -> list[Any]:
    return [adam(nets["a"].parameters(), plain=plain)]


def over_all(nets: Nets, *, plain: bool) -> list[Any]:
    return [adam([*nets["a"].parameters(), *nets["b"].parameters()], plain=plain)]


def two(nets: Nets, *, plain: bool) -> list[Any]:
    return [adam(nets["a"].parameters(), plain=plain), sgd(nets["b"].parameters(), plain=plain)]


def nets() -> Nets:
    return {"a": Net(1), "b": Net(2)}


def wrapped(models: Nets, optimizers: list[Any], **options: Any) -> list[Any]:
    given = optimizers[0] if len(optimizers) == 1 else optimizers
    options.setdefault("rates", overspill.Rates())
    made: Any = overspill.wrap(models, given, **options)
    return made if isinstance(made, list) else [made]
