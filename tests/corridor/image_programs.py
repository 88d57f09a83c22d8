"""Training programs of images, as `programs.py` has them of text."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corridor.programs import Compile, Step, program, supervised

ROWS = 8


def pictures(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of random images and labels."""
    return [(torch.randn(ROWS, *shape), torch.randint(10, (ROWS,))) for _ in range(3)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


@program
def dcgan(compile: Compile) -> Step:
    """pytorch/examples dcgan: two networks, two optimizers, a backward through both."""
    up = lambda i, o, s, p: nn.ConvTranspose2d(i, o, 4, s, p, bias=False)  # noqa: E731
    generator = nn.Sequential(
        *(up(8, 16, 1, 0), nn.BatchNorm2d(16), nn.ReLU(True), up(16, 8, 2, 1)),
        *(nn.BatchNorm2d(8), nn.ReLU(True), up(8, 3, 2, 1), nn.Tanh()),
    )
    down = lambda i, o, s, p: nn.Conv2d(i, o, 4, s, p, bias=False)  # noqa: E731
    discriminator = nn.Sequential(
        *(down(3, 8, 2, 1), nn.LeakyReLU(0.2, inplace=True), down(8, 16, 2, 1)),
        *(nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True), down(16, 1, 4, 0)),
        *(nn.Sigmoid(), nn.Flatten(0)),
    )
    for module in itertools.chain(generator.modules(), discriminator.modules()):
        if "Conv" in type(module).__name__:
            nn.init.normal_(module.weight, 0.0, 0.02)  # type: ignore[arg-type]
    make, judge = compile(generator), compile(discriminator)
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for m in (discriminator, generator)
    ]
    criterion, images = nn.BCELoss(), itertools.cycle(x for x, _ in pictures(3, 16, 16))

    def step() -> Tensor:
        discriminator.zero_grad()
        real = next(images)
        label = torch.full((ROWS,), 1.0)
        loss_real = criterion(judge(real), label)
        loss_real.backward()
        fake = make(torch.randn(ROWS, 8, 1, 1))
        label.fill_(0.0)
        loss_fake = criterion(judge(fake.detach()), label)
        loss_fake.backward()
        optimizers[0].step()
        generator.zero_grad()
        label.fill_(1.0)
        loss = criterion(judge(fake), label)
        loss.backward()
        optimizers[1].step()
        return (loss_real + loss_fake + loss).detach()

    return step


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 1), nn.Conv2d(16, 32, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32 * 36, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return F.log_softmax(x, dim=1)


@program
def mnist(compile: Compile) -> Step:
    """pytorch/examples mnist: Adadelta, a scheduler, a last batch that is smaller."""
    model = Digits()
    compiled = compile(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    batches = pictures(1, 16, 16)
    batches[-1] = (batches[-1][0][:3], batches[-1][1][:3])
    train = supervised(compiled, optimizer, batches, F.nll_loss)

    def step() -> Tensor:
        loss = train()
        scheduler.step()
        return loss

    return step


try:
    from einops import rearrange
except ImportError:

    def rearrange(x: Tensor, pattern: str, /, **sizes: int) -> Tensor:
        """Einops' own: names in parentheses make one dimension."""
        left, right = (
            [re.findall("[a-z][0-9]?", group) for group in re.findall(r"\([^)]*\)|\S+", side)]
            for side in pattern.split("->")
        )
        lengths = dict(sizes)
        for group, size in zip(left, x.shape, strict=True):
            free = [name for name in group if name not in lengths]
            rest = math.prod(lengths[name] for name in group if name in lengths)
            lengths |= dict.fromkeys(free, size // rest)
        names = [name for group in left for name in group]
        x = x.reshape([lengths[name] for name in names])
        x = x.permute([names.index(name) for group in right for name in group])
        return x.reshape([math.prod(lengths[name] for name in group) for group in right])


class Residual(nn.Module):
    """Two convolutions whose scale and shift follow from the time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        conv = lambda size: nn.Conv2d(size, outputs, 3, padding=1)  # noqa: E731
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), conv(inputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), conv(outputs)
        self.time, self.skip = nn.Linear(32, 2 * outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.norm2(self.conv1(F.silu(self.norm1(x))))
        scale, shift = rearrange(self.time(F.silu(time)), "b c -> b c 1 1").chunk(2, dim=1)
        return self.conv2(F.silu(h * (scale + 1) + shift)) + self.skip(x)


class PixelAttention(nn.Module):
    """Linear attention of each pixel to all: softmax of keys and queries apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, width, 1, 1))
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1, bias=False), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        normed = F.normalize(x, dim=1) * self.gain * c**0.5
        split = "b (h c) x y -> b h c (x y)"
        q, k, v = (rearrange(t, split, h=2) for t in self.qkv(normed).chunk(3, dim=1))
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(dim=-1), v)
        out = torch.einsum("bhde,bhdn->bhen", context, q.softmax(dim=-2) * (c // 2) ** -0.5)
        return self.out(rearrange(out, "b h c (x y) -> b (h c) x y", x=h, y=w)) + x


class UNet(nn.Module):
    """Down and up again, with what is joined from the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.down = nn.ModuleList([Residual(16, 16), Residual(16, 32)])
        self.shrink = nn.ModuleList([nn.Conv2d(n, n, 3, 2, 1) for n in (16, 32)])
        self.up = nn.ModuleList([Residual(64, 16), Residual(32, 16)])
        self.middle = PixelAttention(32)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The time is seen as sines and cosines."""
        angles = time[:, None] * torch.exp(torch.arange(8) * (-math.log(10000) / 7))[None, :]
        embedded = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x, kept = self.into(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, embedded)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, kept.pop()), dim=1), embedded)
        return self.out(x)


class Diffusion(nn.Module):
    """Adds noise of a random time to images and asks a network for it."""

    kept: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0))

    def forward(self, image: Tensor) -> Tensor:
        time, noise = torch.randint(0, 100, (len(image),)), torch.randn_like(image)
        alpha = self.kept.gather(-1, time).reshape(-1, 1, 1, 1)
        found = self.net(alpha.sqrt() * image + (1 - alpha).sqrt() * noise, time)
        loss = F.mse_loss(found, noise, reduction="none")
        weight = torch.minimum(alpha / (1 - alpha), torch.full_like(alpha, 5.0)).flatten()
        return (loss.flatten(1).mean(dim=1) * weight).mean()


@program
def denoising_diffusion(compile: Compile) -> Step:
    """lucidrains/denoising-diffusion-pytorch: a U-Net of noise and time, and a running mean of weights."""
    model = Diffusion(UNet())
    means = [p.detach().clone() for p in model.parameters()]
    batches = [(x, None) for x, _ in pictures(3, 16, 16)]
    train = supervised(compile(model), adam(model), batches, lambda loss, _: loss)

    def step() -> Tensor:
        loss = train()
        for mean, p in zip(means, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)
        return loss

    return step


class DiagonalGaussian:
    def __init__(self, parameters: Tensor) -> None:
        self.mean, self.log = parameters.chunk(2, dim=1)

    def sample(self) -> Tensor:
        return self.mean + torch.exp(0.5 * self.log) * torch.randn(self.mean.shape)

    def kl(self) -> Tensor:
        return 0.5 * torch.sum(self.mean.pow(2) + self.log.exp() - 1 - self.log, dim=1)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, DiagonalGaussian]:
        posterior = DiagonalGaussian(self.encode(x.view(-1, 64)))
        return self.decode(posterior.sample()), posterior


@program
def vae(compile: Compile) -> Step:
    """huggingface/diffusers AutoencoderKL: an object of the user's among the outputs."""
    model = VAE()

    def loss(out: Any, x: Tensor) -> Tensor:
        entropy = F.binary_cross_entropy(out[0], x.view(-1, 64), reduction="sum")
        return entropy + out[1].kl().sum()

    batches = [(x, x) for x in (torch.rand(rows, 1, 8, 8) for rows in (32, 32, 17))]
    return supervised(compile(model), adam(model), batches, loss)
