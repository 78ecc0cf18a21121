"""GPT-NeoX to be trained: a batch of rows of equal length, gradients, nothing made for speed.

Its modules have the names of the published tensors, so its weights are a checkpoint's. The logits
are gpt_neox.py's (a test holds them together). It can write, too: many texts at once, where
gpt_neox.py writes one.

    model = Trainable(config, fresh_tensors(config, 0, device))
    logits = model(tokens)  # [B, T, V]

Shapes: B rows, T tokens of each, L layers, H heads, D head size, R rotary dims, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoint import ACTIVATIONS, Config, expected_shapes
from engine.rotary import rotary_table

STD = 0.02  # of fresh weights, GPT-2's and Pythia's
TINY = torch.finfo(torch.float32).tiny


class Layer(nn.Module):
    """Attention and MLP around the residual x [B, T, hidden], which is float32."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        wide = config.intermediate_size
        has_bias = config.has_attention_bias
        self.input_layernorm = nn.LayerNorm(hidden, config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(hidden, config.norm_eps)
        self.attention = nn.ModuleDict()
        self.attention["query_key_value"] = nn.Linear(hidden, 3 * hidden, has_bias)
        self.attention["dense"] = nn.Linear(hidden, hidden, has_bias)
        self.mlp = nn.ModuleDict()
        self.mlp["dense_h_to_4h"] = nn.Linear(hidden, wide)
        self.mlp["dense_4h_to_h"] = nn.Linear(wide, hidden)

    def forward(self, x: Tensor, turns: Tensor, past: Tensor | None, start: int) -> Tensor:
        attended = self.attend(self.input_layernorm(x), turns, past, start)
        if self.config.is_parallel:
            return x + attended + self.process(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.process(self.post_attention_layernorm(x))

    def attend(self, x: Tensor, turns: Tensor, past: Tensor | None, start: int) -> Tensor:
        """Causal attention of tokens that stand from `start` on: the first ones, or one more."""
        n_rows, n_tokens, _ = x.shape
        assert n_tokens == 1 or start == 0, "several tokens would need a mask"
        qkv = self.attention["query_key_value"](x)
        qkv = qkv.view(n_rows, n_tokens, self.config.n_heads, 3, self.config.head_size)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [B, H, T, D] each
        q = rotated(q, turns)
        k = rotated(k, turns)
        if past is not None:  # [2, B, H, S, D]
            end = start + n_tokens
            past[0, :, :, start:end] = k
            past[1, :, :, start:end] = v
            k, v = past[:, :, :, :end]
            q = q.type_as(k)
        with torch.autocast(x.device.type, enabled=False):  # in the dtype that they have
            x = F.scaled_dot_product_attention(q, k, v, is_causal=n_tokens > 1)  # [B, H, T, D]
        return self.attention["dense"](x.transpose(1, 2).flatten(2))

    def process(self, x: Tensor) -> Tensor:
        inside = self.mlp["dense_h_to_4h"](x)  # [B, T, intermediate]
        active = F.gelu(inside, approximate=ACTIVATIONS[self.config.activation])
        return self.mlp["dense_4h_to_h"](active)


class Trainable(nn.Module):
    """The whole model, with these weights: checkpoint name -> tensor, on one device."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no memory: the weights are there already
            self.gpt_neox = nn.ModuleDict()
            self.gpt_neox["embed_in"] = nn.Embedding(config.vocab_size, config.hidden_size)
            self.gpt_neox["layers"] = nn.ModuleList([Layer(config) for _ in range(config.n_layers)])
            self.gpt_neox["final_layer_norm"] = nn.LayerNorm(config.hidden_size, config.norm_eps)
            if not config.is_tied:
                self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.load_state_dict(tensors, assign=True)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()  # as x is

    @property
    def head(self) -> Tensor:
        """What scores are products with, [V, hidden]."""
        if self.config.is_tied:
            return self.gpt_neox["embed_in"].weight
        return self.embed_out.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of what follows each of tokens [B, T] int64."""
        return self.scores(self.read(tokens))

    def read(self, tokens: Tensor, past: Tensor | None = None, start: int = 0) -> Tensor:
        """x [B, T, hidden] after all layers; past: keys and values [L, 2, B, H, S, D], in which
        slots [0, start) are filled and those of these tokens will be."""
        config = self.config
        x = self.gpt_neox["embed_in"](tokens).float()
        turns = rotary_table(config, start + tokens.shape[1], x.device)[start:]  # [T, R / 2]
        for i, layer in enumerate(self.gpt_neox["layers"]):
            layer_past = None if past is None else past[i]
            x = layer(x, turns, layer_past, start)
        return x

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(self.gpt_neox["final_layer_norm"](x), self.head)

    def new_past(self, n_rows: int, n_slots: int) -> Tensor:
        """Room for keys and values, [L, 2, B, H, S, D]; float32 on a CPU, whose attention of one
        token is three times as fast in it (measured)."""
        config = self.config
        device = self.head.device
        dtype = torch.float32 if device.type == "cpu" else self.head.dtype
        shape = (config.n_layers, 2, n_rows, config.n_heads, n_slots, config.head_size)
        return torch.zeros(shape, device=device, dtype=dtype)

    @torch.inference_mode()
    def write(
        self,
        prompts: Tensor,
        n_tokens: int,
        temperatures: Tensor,
        chance: torch.Generator,
        n_ids: int,
    ) -> Tensor:
        """Prompts [B, T] int64, each continued by n_tokens at its temperature [B], 0 for greedy,
        with the first n_ids alone."""
        n_rows, n_prompt = prompts.shape
        texts = F.pad(prompts, (0, n_tokens))
        past = self.new_past(n_rows, texts.shape[1])
        x = self.read(prompts, past)
        for end in range(n_prompt, texts.shape[1]):
            logits = self.scores(x[:, -1])[:, :n_ids].float()
            # The best after noise of Gumbel's distribution is a draw; 0 x inf would be nan
            noise = torch.empty_like(logits).uniform_(TINY, 1, generator=chance)
            noise = noise.log_().neg_().log_().neg_()
            texts[:, end] = (logits + temperatures[:, None] * noise).argmax(-1)
            x = self.read(texts[:, end : end + 1], past, end)
        return texts


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Queries or keys [B, H, T, D], dimension i turned together with R / 2 + i."""
    n_pairs = turns.shape[1]
    cos = turns.real  # [T, R / 2]
    sin = turns.imag
    first = x[..., :n_pairs]
    second = x[..., n_pairs : 2 * n_pairs]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.type_as(x), x[..., 2 * n_pairs :]], dim=-1)


def fresh_tensors(config: Config, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Weights that have learned nothing, float32, by checkpoint name."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 2:
            std = STD
            if name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight")):
                std /= (2 * config.n_layers) ** 0.5  # so many are added up (Radford et al. 2019)
            tensor = torch.randn(shape, generator=chance) * std
        elif name.endswith("weight"):
            tensor = torch.ones(shape)
        else:
            tensor = torch.zeros(shape)
        tensors[name] = tensor.to(device)
    return tensors


def published_json(config: Config) -> dict:
    """The config.json of a model, as Pythia's is written."""
    first = config.eos_ids[0] if config.eos_ids else None
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "rotary_pct": config.rotary_fraction,
        "rotary_emb_base": config.rotary_base,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.is_parallel,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_attention_bias,
        "bos_token_id": first,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) > 1 else first,
        "torch_dtype": "float16",
    }
