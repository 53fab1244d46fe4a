"""The whole schema: every field, its meaning, and its default (the full scale at 8K).

A stage file (`configs/8k.py`) and a scale (`configs/scales.py`) state only what they change.
Types and limits are checked in `mlmoe/config.py`. Override any field on the command line:
`--config.steps=500 --config.optim.lr=0.01`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.stage = ""  # curriculum stage; set by the stage file
    c.scale = ""  # size of the model; set by the scale
    c.architecture = "fixed"  # the final one from stage 8k on, or staged: each stage has its own
    c.init_from = ""  # workdir of the run whose weights this one starts with; '' for fresh ones
    c.workdir = ""  # checkpoints, metrics and plots go here; '' means runs/<stage>-<scale>
    c.seed = 0  # of the initial parameters and of the order of the data
    c.context = 8192  # tokens a row
    c.batch = 2048  # rows an optimizer step, over all devices and micro-batches
    c.accumulate = 1  # micro-batches an optimizer step is cut into
    c.steps = 100_000  # optimizer steps of the whole run
    c.log_every = 10  # steps between lines of progress and metrics
    c.eval_every = 1_000  # steps between evaluations on held-out documents
    c.eval_bytes = 1 << 20  # held-out text an evaluation reads, in whole documents
    c.save_every = 1_000  # steps between checkpoints
    c.keep = 3  # newest checkpoints kept
    c.final_eval_bytes = 16 << 20  # the same for the evaluation at the end
    c.sample_tokens = 200  # tokens of the text sample at the end; 0 for none
    c.state_check_every = 1_000  # steps between comparisons of the states with float64; 0: never
    c.state_error_max = 1e-2  # a warning where a state's relative error is larger
    c.mesh = mesh()
    c.model = model()
    c.data = data()
    c.optim = optim()
    return c


def next_stage(c: ConfigDict, name: str, context: int, batch: int, steps: int) -> None:
    """A later stage of the curriculum: longer rows, fewer of them, a fifth of the learning rate."""
    c.update(stage=name, context=context, batch=batch, steps=steps)
    c.update(eval_every=steps // 10, save_every=steps // 10, state_check_every=steps // 10)
    c.data.update(packing="best_fit", long_rows=0.5)
    c.optim.update(lr=c.optim.lr / 5, adam_lr=c.optim.adam_lr / 5, warmup=steps // 20)


def mesh() -> ConfigDict:
    m = ConfigDict()
    m.expert = 1  # devices that share one copy of the routed experts; divides model.moe.experts
    return m


def model() -> ConfigDict:
    m = ConfigDict()
    m.layout = "interleaved"  # preset (interleaved, thirds) or one letter a layer: F L R B D A S
    m.layers = 93
    m.vocab = 163_840  # rows of the embedding; at least the tokenizer's vocabulary
    m.d_model = 7168
    m.norm_eps = 1e-5
    m.tie_head = False  # head = embedding transposed
    m.vocab_chunk = 8192  # logits of the loss that exist at a time, in vocabulary entries
    m.remat = "full"  # kept for the backward pass: none (everything), dots (matmuls), full (inputs)
    m.dtype = "auto"  # of activations: bfloat16 on accelerators, float32 on CPU

    m.attention = a = ConfigDict()  # letters F, L, R, B
    a.heads = 96
    a.head_dim = 128  # F: width of q, k and v
    a.q_rank = 1536  # L, R, B: low-rank width of q
    a.kv_rank = 512  # L, R, B: the latent that is cached
    a.nope_dim = 128  # L, R, B: key width a head without position
    a.rope_dim = 64  # L, R, B: key width shared by all heads; rotated in R
    a.v_dim = 128
    a.rope_theta = 5e5  # F, R: base of the rotary frequencies
    a.kv_share = 1  # L, R, B: so many consecutive ones share one latent cache

    m.incremental = i = ConfigDict()  # letters D, A, S
    i.heads = 96
    i.key_dim = 128
    i.value_dim = 128
    i.slots = 512  # S: slots a head
    i.conv_width = 4  # tokens of the short convolution on q, k, v
    i.gate_rank = 128  # low-rank width of the decay's projection
    i.g_min = -5.0  # lower bound of the log-decay: exp(-5) is the decay floor
    i.beta_max = 1.0  # D: 1 or 2; with 2 the state can flip sign (parity needs it)
    i.memory_min = 2.0  # tokens that the fastest channel remembers at the start
    i.memory_max = 1e5  # tokens that the slowest channel remembers at the start

    m.moe = e = ConfigDict()
    e.activation = "capped"  # SiTU-GLU, capped (3 matrices) or four (4 matrices); or swiglu
    e.dense_layers = 1  # leading layers with a dense MLP in place of experts
    e.dense_hidden = 33_792
    e.experts = 896
    e.active = 16  # experts a token
    e.latent = 3584  # width that routed experts live in
    e.hidden = 3072  # of one routed expert
    e.shared_hidden = 6144  # of the shared experts together, at full width
    e.temperature = 1.0  # of the router's sigmoid, at the start
    e.temperature_final = 0.0  # at the end, reached on a straight line; 0: stays as it is
    e.temperature_learned = False  # a factor on it that each layer learns
    e.balance = "quantile"  # quantile, quantile_sign, capacity, sign, aux_loss or none
    e.balance_rate = 1e-3  # quantile_sign, sign: what a bias moves by a step
    e.aux_weight = 1e-2  # aux_loss: weight of the loss term
    e.capacity_factor = (
        1.0  # capacity: most of an expert in a micro-batch of a device, over the mean; >= 1
    )
    e.reroutes = 8  # capacity: rounds in which tokens that were refused ask the next-best expert
    e.transport = "auto"  # of tokens, mesh.expert > 1: ragged or gather; auto: ragged on a TPU
    e.buffer = 0.0  # ragged: room for this many times a shard's mean load, >= 1; 0 for any load

    m.residual = r = ConfigDict()
    r.kind = "block"  # none, window (projections of earlier mixers) or block (softmax over depth)
    r.size = 12  # layers of a block, or of the window
    return m


def data() -> ConfigDict:
    d = ConfigDict()
    d.source = "stdlib"  # stdlib, files, jsonl, parquet, arrayrecord, bin or tasks
    d.path = ""  # file, folder or glob; empty for stdlib; tasks: names, as in passkey,mqar:2048
    d.mixture = ()  # ((source, path, weight), ...) in place of source and path
    d.text_field = "text"  # jsonl, parquet: the column that holds the text
    d.tokenizer = "bytes"  # or the path of a Hugging Face tokenizer.json
    d.packing = (
        "split"  # split (rows always full, documents cut) or best_fit (whole where they fit)
    )
    # Rows filled side by side, each from its own documents. With fewer than the rows of a batch,
    # neighbours in it hold parts of the same documents.
    d.pack_bins = 32
    d.join_files = False  # stdlib, files: files of a folder follow each other in one document
    d.long_rows = 0.0  # share of the rows made of documents of at least 3/4 row; 0: as they come
    d.heldout = 0.05  # share of documents held out, by hash
    d.on_bad = "raise"  # a bad document stops the run (raise) or is counted and left out (skip)
    d.max_line_mb = 64  # jsonl: a longer line is a bad document
    d.bin_dtype = "uint32"  # bin: type of the token ids
    d.prefetch = 4  # batches prepared ahead
    return d


def optim() -> ConfigDict:
    o = ConfigDict()
    o.name = "muon"  # muon (matrices; the rest by adam) or adamw
    o.lr = 2e-3  # peak, Muon's matrices
    o.adam_lr = 2e-3  # peak, everything that Adam updates
    o.warmup = 1_000  # steps
    o.schedule = "cosine"  # or wsd: warm-up, stable, linear decay
    o.decay = 0.2  # wsd: share of the run that decays
    o.final_lr = 0.0  # last learning rate as a fraction of the peak
    o.weight_decay = 0.1
    o.clip = 1.0  # global norm of the gradient
    o.momentum = 0.95  # Muon
    o.b1 = 0.9  # Adam
    o.b2 = 0.95  # Adam
    o.z_loss = 0.0  # weight of the squared log-partition
    o.max_bad_steps = 10  # non-finite steps in a row that end the run
    return o
