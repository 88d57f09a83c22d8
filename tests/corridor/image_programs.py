"""Training programs of images, as `programs.py` has them of text."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corridor.programs import Compile, Step, program, supervised

ROWS = 8


def pictures(*shape: int, classes: int = 10, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of random images and labels."""
    return [(torch.randn(ROWS, *shape), torch.randint(classes, (ROWS,))) for _ in range(count)]


def adam(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), rate)


# -- pytorch/examples


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hide, self.mean, self.log = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.show, self.out = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.hide(x.view(-1, 784)))
        mean, log = self.mean(h), self.log(h)
        deviation = torch.exp(0.5 * log)
        z = mean + torch.randn_like(deviation) * deviation
        return torch.sigmoid(self.out(F.relu(self.show(z)))), mean, log


@program
def vae(compile: Compile) -> Step:
    """pytorch/examples vae."""
    model = VAE()

    def loss_of(found: Any, x: Tensor) -> Tensor:
        image, mean, log = found
        entropy = F.binary_cross_entropy(image, x.view(-1, 784), reduction="sum")
        return entropy - 0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())

    batches = [(x, x) for x in (torch.rand(rows, 1, 28, 28) for rows in (32, 32, 17))]
    return supervised(compile(model), adam(model), batches, loss_of)


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


class SuperResolution(nn.Module):
    def __init__(self, factor: int = 3) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, 1, 2), nn.Conv2d(16, 16, 3, 1, 1)
        self.conv3, self.conv4 = nn.Conv2d(16, 8, 3, 1, 1), nn.Conv2d(8, factor**2, 3, 1, 1)
        self.shuffle = nn.PixelShuffle(factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv4.weight)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return self.shuffle(self.conv4(x))


@program
def super_resolution(compile: Compile) -> Step:
    """pytorch/examples super_resolution."""
    model = SuperResolution()
    batches = [(torch.rand(ROWS, 1, 8, 8), torch.rand(ROWS, 1, 24, 24)) for _ in range(3)]
    return supervised(compile(model), adam(model), batches, F.mse_loss)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        )
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward_once(self, x: Tensor) -> Tensor:
        output = self.trunk(x)
        return output.view(output.size()[0], -1)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        both = torch.cat([self.forward_once(x) for x in pair], 1)
        return torch.sigmoid(self.fc(both))


@program
def siamese(compile: Compile) -> Step:
    """pytorch/examples siamese_network: one trunk, run twice."""
    model = Siamese()
    images = pictures(1, 16, 16, classes=2)
    batches = [((x, x.flip(0)), labels.float()) for x, labels in images]
    loss = lambda out, target: F.binary_cross_entropy(out.squeeze(), target)  # noqa: E731
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return supervised(compile(model), optimizer, batches, loss)


# -- vision transformers with einops


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


class Rearrange(nn.Module):
    def __init__(self, pattern: str, **sizes: int) -> None:
        super().__init__()
        self.pattern, self.sizes = pattern, sizes

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, self.pattern, **self.sizes)


WIDTH, HEADS, PATCH = 64, 4, 4


def patches(side: int = 16) -> nn.Sequential:
    cut = Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=PATCH, p2=PATCH)
    size = 3 * PATCH * PATCH
    return nn.Sequential(cut, nn.LayerNorm(size), nn.Linear(size, WIDTH), nn.LayerNorm(WIDTH))


class EinopsAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=HEADS), parts)  # noqa: C417
        weights = (torch.matmul(q, k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5).softmax(dim=-1)
        out = torch.matmul(self.drop(weights), v)
        return self.out(rearrange(out, "b h n d -> b n (h d)"))


def feed_forward(dropout: float = 0.0, width: int = WIDTH) -> nn.Sequential:
    inner = (nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout))
    return nn.Sequential(nn.LayerNorm(width), *inner, nn.Linear(2 * width, width))


class ViT(nn.Module):
    """With a class token and learned positions; or `simple`: waves for positions, and a mean."""

    places: Tensor

    def __init__(self, simple: bool) -> None:
        super().__init__()
        dropout = 0.0 if simple else 0.1
        self.simple, self.patches, self.head = simple, patches(), nn.Linear(WIDTH, 10)
        if not simple:
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.places = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleList([EinopsAttention(dropout), feed_forward(dropout)]) for _ in range(2)
        )
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(WIDTH)

    def waves(self, side: int) -> Tensor:
        y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        rates = 1.0 / 1e4 ** (torch.arange(WIDTH // 4) / (WIDTH // 4 - 1))
        y, x = (t.flatten()[:, None] * rates[None, :] for t in (y, x))
        return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        if self.simple:
            x = x + self.waves(image.shape[-1] // PATCH).type(x.dtype)
        else:
            x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1)
            x = self.drop(x + self.places[:, : x.shape[1]])
        for attend, feed in self.layers:  # type: ignore[misc]
            x = attend(x) + x
            x = feed(x) + x
        x = self.norm(x)
        return self.head(x.mean(dim=1) if self.simple else x[:, 0])


@program
def vit(compile: Compile) -> Step:
    """lucidrains/vit-pytorch ViT."""
    model = ViT(simple=False)
    return supervised(compile(model), adam(model), pictures(3, 16, 16))


@program
def simple_vit(compile: Compile) -> Step:
    """lucidrains/vit-pytorch SimpleViT."""
    model = ViT(simple=True)
    return supervised(compile(model), adam(model), pictures(3, 16, 16))


# -- networks of the kinds in timm


class DropPath(nn.Module):
    def __init__(self, chance: float = 0.1) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        if self.chance == 0.0 or not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(1 - self.chance).div_(1 - self.chance)


class Around(nn.Module):
    """x + scale * drop(layer(x)), what most of these networks repeat."""

    def __init__(self, layer: nn.Module, scale: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.drop = layer, DropPath()
        self.scale = None if scale is None else nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return x + self.drop(y if self.scale is None else y * self.scale)


class Channels(nn.Module):
    """A layer for channels-last images, between images with channels first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Across(nn.Module):
    """A layer over tokens instead of features."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Squeeze(nn.Module):
    """Channels weighted by what the whole image says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * self.expand(F.silu(self.reduce(means), inplace=True)).sigmoid()


class WindowAttention(nn.Module):
    """Of Swin: windows of 2 x 2, moved by half a window or not, with learned biases of place."""

    index: Tensor
    mask: Tensor | None

    def __init__(self, width: int, side: int, shift: int, window: int = 2) -> None:
        super().__init__()
        self.shift, self.window = shift, window
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, HEADS) * 0.02)
        places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = places[:, None] - places[None] + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1])
        mask = None
        if shift:
            parts = torch.zeros(1, side, side, 1)
            cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
            for number, (rows, columns) in enumerate(itertools.product(cuts, cuts)):
                parts[:, rows, columns] = number
            flat = self.cut(parts).squeeze(-1)
            mask = torch.where(flat[:, None] == flat[:, :, None], 0.0, -100.0)
        self.register_buffer("mask", mask)

    def cut(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        x = x.view(b, h // n, n, w // n, n, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, n * n, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = (
            torch.roll(self.norm(x), (-self.shift, -self.shift), dims=(1, 2))
            if self.shift
            else self.norm(x)
        )
        x = self.cut(x)
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(*self.index.shape, -1)
        weights = weights + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.mask is not None:
            count = self.mask.shape[0]
            weights = weights.view(-1, count, *weights.shape[1:]) + self.mask[None, :, None]
            weights = weights.flatten(0, 1)
        x = self.out((weights.softmax(dim=-1) @ v).transpose(1, 2).reshape(x.shape))
        n = self.window
        x = x.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).contiguous()
        x = x.view(b, h, w, c)
        return torch.roll(x, (self.shift, self.shift), dims=(1, 2)) if self.shift else x


def norm_act(width: int, act: bool = True) -> tuple[nn.Module, ...]:
    return nn.BatchNorm2d(width), nn.ReLU(inplace=True) if act else nn.Identity()


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = conv(inputs, outputs, 3, stride), *norm_act(outputs)
        self.body = nn.Sequential(*first, conv(outputs, outputs), *norm_act(outputs, False))
        self.act, self.down = nn.ReLU(inplace=True), None
        if stride > 1:
            self.down = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x if self.down is None else self.down(x)
        return self.act(y)


def inverted(width: int) -> nn.Sequential:
    """EfficientNet's block: wider, a filter for each channel, narrower."""
    wide = 2 * width
    into = conv(width, wide, 1), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
    deep = conv(wide, wide, 3, groups=wide), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
    return nn.Sequential(*into, *deep, Squeeze(wide), conv(wide, width, 1), nn.BatchNorm2d(width))


def tokens() -> tuple[nn.Module, ...]:
    return nn.Conv2d(3, WIDTH, PATCH, PATCH), Rearrange("b c h w -> b (h w) c")


def pooled(width: int = WIDTH) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)


def mean_of_tokens() -> tuple[nn.Module, ...]:
    return nn.LayerNorm(WIDTH), Across(nn.AdaptiveAvgPool1d(1)), nn.Flatten(), nn.Linear(WIDTH, 10)


def resnet() -> nn.Sequential:
    stem = conv(3, 16, 7, 2), *norm_act(16), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, BasicBlock(16, 16, 1), BasicBlock(16, WIDTH, 2), *pooled())


def convnext() -> nn.Sequential:
    mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
    deep = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), Channels(nn.Sequential(*mlp))
    stem = nn.Conv2d(3, WIDTH, 2, 2), Channels(nn.LayerNorm(WIDTH))
    scale = torch.full((WIDTH, 1, 1), 1e-2)
    return nn.Sequential(*stem, Around(nn.Sequential(*deep), scale), *pooled())


def mixer() -> nn.Sequential:
    one = lambda: Around(nn.Sequential(nn.LayerNorm(WIDTH), Across(feed_forward(0.0, 16))))  # noqa: E731
    return nn.Sequential(*tokens(), one(), Around(feed_forward()), one(), *mean_of_tokens())


def efficientnet() -> nn.Sequential:
    stem = conv(3, WIDTH, 3, 2), nn.BatchNorm2d(WIDTH), nn.SiLU(inplace=True)
    return nn.Sequential(*stem, Around(inverted(WIDTH)), Around(inverted(WIDTH)), *pooled())


def deit() -> nn.Sequential:
    layers = (EinopsAttention(0.0), feed_forward()) * 2
    scaled = (Around(layer, torch.full((WIDTH,), 1e-2)) for layer in layers)
    return nn.Sequential(*tokens(), *scaled, *mean_of_tokens())


def swin() -> nn.Sequential:
    windows = (Around(WindowAttention(WIDTH, 4, shift)) for shift in (0, 1))
    stem = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.GroupNorm(1, WIDTH)
    blocks = (nn.Sequential(window, Around(feed_forward())) for window in windows)
    body = (Channels(block) for block in blocks)
    return nn.Sequential(*stem, *body, *pooled())


def classifier(network: Callable[[], nn.Module], side: int = 16) -> Callable[[Compile], Step]:
    """A program of the name and kind of a network of timm."""

    @functools.wraps(network)
    def train(compile: Compile) -> Step:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        return supervised(compile(model), optimizer, pictures(3, side, side))

    return program(train)


for _network in (resnet, convnext, mixer, efficientnet, deit, swin):
    classifier(_network)
