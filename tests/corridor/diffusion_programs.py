"""Training programs that generate images, as `programs.py` has them of text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corridor.image_programs import ROWS, adam, pictures, rearrange
from tests.corridor.programs import Compile, Step, program, supervised


def time_waves(time: Tensor, width: int = 16) -> Tensor:
    """Sines and cosines of a time step."""
    rates = torch.exp(torch.arange(width // 2) * (-math.log(10000) / (width // 2 - 1)))
    angles = time[:, None] * rates[None, :]
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Residual(nn.Module):
    """Two convolutions whose scale and shift follow from the time, as in all of these networks."""

    def __init__(self, inputs: int, outputs: int, shifted: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(32, 2 * outputs) if shifted else None
        self.drop, same = nn.Dropout(0.1), inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        h = self.norm2(self.conv1(F.silu(self.norm1(x))))
        if self.time is not None and time is not None:
            shifts = self.time(F.silu(time))
            scale, shift = rearrange(shifts, "b c -> b c 1 1").chunk(2, dim=1)
            h = h * (scale + 1) + shift
        return self.conv2(self.drop(F.silu(h))) + self.skip(x)


class PixelAttention(nn.Module):
    """Of each pixel to all; or linear: softmax of keys and queries apart."""

    def __init__(self, width: int, linear: bool) -> None:
        super().__init__()
        self.linear, self.gain = linear, nn.Parameter(torch.ones(1, width, 1, 1))
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1, bias=False), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        normed = F.normalize(x, dim=1) * self.gain * c**0.5
        split = "b (h c) x y -> b h c (x y)"
        q, k, v = (rearrange(t, split, h=2) for t in self.qkv(normed).chunk(3, dim=1))
        if self.linear:
            q, k = q.softmax(dim=-2) * (c // 2) ** -0.5, k.softmax(dim=-1)
            context = torch.einsum("bhdn,bhen->bhde", k, v)
            out = torch.einsum("bhde,bhdn->bhen", context, q)
        else:
            q, k, v = (t.transpose(-1, -2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        return self.out(rearrange(out, "b h c (x y) -> b (h c) x y", x=h, y=w)) + x


class UNet(nn.Module):
    """Down and up again, with what is joined from the way down."""

    def __init__(self, middle: nn.Module, channels: int, outer: bool) -> None:
        super().__init__()
        self.into, self.middle = nn.Conv2d(channels, 16, 3, padding=1), middle
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.down = nn.ModuleList([Residual(16, 16), Residual(16, 32)])
        self.shrink = nn.ModuleList([nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)])
        self.up = nn.ModuleList([Residual(64, 16), Residual(32, 16)])
        self.outer = PixelAttention(16, linear=True) if outer else nn.Identity()
        self.out = nn.Conv2d(16, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None = None) -> Tensor:
        embedded = self.time(time_waves(time))
        x, kept = self.outer(self.into(x)), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, embedded)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x) if context is None else self.middle(x, context)
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

    def forward(self, image: Tensor, *context: Tensor) -> Tensor:
        time = torch.randint(0, 100, (len(image),))
        noise = torch.randn_like(image)
        alpha = self.kept.gather(-1, time).reshape(-1, 1, 1, 1)
        noisy = alpha.sqrt() * image + (1 - alpha).sqrt() * noise
        found = self.net(noisy, time, *context)
        loss = F.mse_loss(found, noise, reduction="none")
        weight = torch.minimum(alpha / (1 - alpha), torch.full_like(alpha, 5.0)).flatten()
        return (loss.flatten(1).mean(dim=1) * weight).mean()


@program
def denoising_diffusion(compile: Compile) -> Step:
    """lucidrains/denoising-diffusion-pytorch: a U-Net with both kinds of attention, and a running mean."""
    model = Diffusion(UNet(PixelAttention(32, linear=False), 3, outer=True))
    means = [p.detach().clone() for p in model.parameters()]
    batches = [(x, None) for x, _ in pictures(3, 16, 16)]
    loss = lambda loss, _: loss  # noqa: E731
    train = supervised(compile(model), adam(model), batches, loss, model.parameters())

    def step() -> Tensor:
        found = train()
        for mean, p in zip(means, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)
        return found

    return step


class SpatialTransformer(nn.Module):
    """Pixels attend to each other, then to a text."""

    def __init__(self, width: int = 32, context: int = 12) -> None:
        super().__init__()
        self.norm, self.into = nn.GroupNorm(4, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.q = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(size, 2 * width, bias=False) for size in (width, context))
        self.gate, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def attend(self, number: int, x: Tensor, context: Tensor) -> Tensor:
        q, (k, v) = self.q[number](x), self.kv[number](context).chunk(2, dim=-1)
        q, k, v = (t.view(len(x), -1, 4, t.shape[-1] // 4).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        b, c, h, w = image.shape
        x = self.into(self.norm(image).permute(0, 2, 3, 1).reshape(b, h * w, c))
        normed = self.norms[0](x)
        x = self.attend(0, normed, normed) + x
        x = self.attend(1, self.norms[1](x), context) + x
        inner, gate = self.gate(self.norms[2](x)).chunk(2, dim=-1)
        x = self.out(inner * F.gelu(gate)) + x
        return x.reshape(b, h, w, c).permute(0, 3, 1, 2).contiguous() + image


@program
def text_to_image(compile: Compile) -> Step:
    """huggingface/diffusers UNet2DConditionModel: noise of latent images, told by a text."""
    model = Diffusion(UNet(SpatialTransformer(), 4, outer=False))
    compiled = compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [((torch.randn(ROWS, 4, 8, 8), torch.randn(ROWS, 5, 12)), None) for _ in range(3)]
    return supervised(lambda pair: compiled(*pair), optimizer, batches, lambda loss, _: loss)


class DiagonalGaussian:
    def __init__(self, parameters: Tensor) -> None:
        self.mean, log = parameters.chunk(2, dim=1)
        self.log = torch.clamp(log, -30.0, 20.0)
        self.deviation, self.variance = torch.exp(0.5 * self.log), torch.exp(self.log)

    def sample(self) -> Tensor:
        return self.mean + self.deviation * torch.randn(self.mean.shape)

    def kl(self) -> Tensor:
        return 0.5 * torch.sum(self.mean.pow(2) + self.variance - 1 - self.log, dim=[1, 2, 3])


class AutoencoderKL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv = lambda i, o, s=1: nn.Conv2d(i, o, 3, s, 1)  # noqa: E731
        block = lambda i, o: Residual(i, o, shifted=False)  # noqa: E731
        self.encoder = nn.Sequential(conv(3, 16), block(16, 16), conv(16, 16, 2), block(16, 32))
        self.middle = PixelAttention(32, linear=False)
        self.quant, self.post_quant = nn.Conv2d(32, 8, 1), nn.Conv2d(4, 32, 1)
        up = nn.Upsample(scale_factor=2.0, mode="nearest")
        last = nn.GroupNorm(4, 16), nn.SiLU(), conv(16, 3)
        self.decoder = nn.Sequential(block(32, 32), up, conv(32, 16), block(16, 16), *last)

    def forward(self, x: Tensor) -> tuple[Tensor, DiagonalGaussian]:
        posterior = DiagonalGaussian(self.quant(self.middle(self.encoder(x))))
        return self.decoder(self.post_quant(posterior.sample())), posterior


@program
def autoencoder_kl(compile: Compile) -> Step:
    """huggingface/diffusers AutoencoderKL: an object of the user's among the outputs."""
    model = AutoencoderKL()
    loss = lambda out, x: F.mse_loss(out[0], x) + 1e-2 * out[1].kl().mean()  # noqa: E731
    batches = [(x, x) for x, _ in pictures(3, 16, 16)]
    return supervised(compile(model), adam(model), batches, loss)
