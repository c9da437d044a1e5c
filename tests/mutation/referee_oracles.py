"""Faults of what is true: masks, streams, references, bounds and variances, one edit each."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["ORACLES"]

_MASK = faults_of(
    "oracles/masks/mask.py",
    "test_mask",
    ("a row just past the last is valid", "if m >= seqlen_q or", "if m > seqlen_q or"),
    ("the left end is exclusive", "n < position - self", "n <= position - self"),
    ("the right end is exclusive", "n > position + self.right", "n >= position + self.right"),
    ("dense is aligned to the top left", "n - self.position(b, m, M=M, N=N)", "n - m"),
    ("dense shows padding rows", "seen = (m < rows) & (n < keys)", "seen = n < keys"),
    ("dense shows padding keys", "seen = (m < rows) & (n < keys)", "seen = m < rows"),
    (
        "dense takes the keys of the first entry for all",
        "len(set(seqlens_q)) <= 1 and len(set(seqlens_k)) <= 1",
        "len(set(seqlens_q)) <= 1",
    ),
    (
        "causal is ignored",
        "return 0 if self.causal else self.window_right",
        "return self.window_right",
    ),
    ("a length may be one too long", "any(length > size for", "any(length > size + 1 for"),
    ("a window may be -1", "    if bound < 0:", "    if bound < -1:"),
    ("causal may contradict the window", "not in (None, 0):", "not in (None, 0, 1):"),
)
_PROBLEM = faults_of(
    "oracles/problem.py",
    "test_problem",
    (
        "parts of a stack have its first seeds",
        "self.all_seeds[start:stop]",
        "self.all_seeds[: stop - start]",
        "test_batched",
    ),
    (
        "parts of a stack have its first lengths",
        "range(start * entries, stop * entries)",
        "range(0, (stop - start) * entries)",
        "test_batched",
    ),
    (
        "a stack may have any number of entries",
        " or self.B % len(self.seeds) or self.B == 0",
        "",
        "test_batched",
    ),
    ("the scale is that of Dv", "float(self.D) ** -0.5", "float(self.Dv) ** -0.5"),
    (
        "JSON leaves the seed out",
        "elif value != item.default:",
        'elif value != item.default and item.name != "seed":',
    ),
    ("another version is read", "if version != VERSION:", "if version is None:"),
    ("one unknown field is passed over", "        if unknown:", "        if len(unknown) > 1:"),
    (
        "a scale of NaN passes",
        "if not 0 < value <= sys.float_info.max:",
        "if value <= 0 or value > sys.float_info.max:",
    ),
    ("H need not be a multiple of Hk", "if self.H % self.Hk:", "if self.H < self.Hk:"),
    (
        "M and N are exchanged for the mask",
        "self.mask.lengths(self.B, self.M, self.N)",
        "self.mask.lengths(self.B, self.N, self.M)",
    ),
    ("G is that of keys", "return self.H // self.Hk", "return self.H"),
)
_CUSTOM = (
    *faults_of(
        "oracles/masks/mask.py",
        "test_custom_masks",
        (
            "a predicate is passed over",
            "return bool(self.mask_mod(b, h, m, n, M=M, N=N))",
            "return True",
        ),
        ("a class takes notice of nothing", "cls.uniform = uniform", "cls.uniform = True"),
        ("taken entries have the lengths of the first", "tuple(x[b] for b in entries)", "(x[0],)"),
        (
            "dense asks about padding rows",
            "torch.minimum(m, rows - 1)[b",
            "m.expand(len(rows), -1, -1, -1)[b",
        ),
    ),
    *faults_of(
        "oracles/masks/mask.py",
        "test_custom_masks",
        ("both is either", "return first & second", "return first | second"),
        ("either is both", "return first | second", "return first & second"),
        ("lengths may differ", "if len(given) > 1:", "if len(given) > 3:"),
        (
            "entries stay in order",
            "window_and_mask_mod(_looked_up(self.entries, b), head",
            "window_and_mask_mod(b, head",
        ),
        (
            "heads stay in order",
            "head = h if self.heads is None else _looked_up(self.heads, h)",
            "head = h",
        ),
        (
            "an entry may come twice",
            "len(set(self.entries)) < len(self.entries)",
            "not self.entries",
        ),
        (
            "entries are not those of entries",
            "entries=tuple(self.entries[b] for b in entries)",
            "entries=entries",
        ),
    ),
    *faults_of(
        "oracles/masks/codec.py",
        "test_problem test_custom_masks",
        ("an unknown mask is looked up", "or name not in MASKS:", "or not name:"),
        ("a shipped name may be taken", "if name in SHIPPED or MASKS", "if MASKS"),
        ("tuples of tuples come back as lists", "tuple(map(_frozen, value))", "tuple(value)"),
    ),
    *faults_of(
        "properties/subjects/loading.py",
        "test_custom_masks",
        (
            "a mask of a shipped name is taken for the shipped one",
            "shipped is mask or Path(source)",
            "shipped is not None or Path(source)",
        ),
        (
            "the file of a shipped mask is another mask",
            "return shipped is mask or ",
            "return shipped is mask and ",
        ),
    ),
    *faults_of(
        "properties/problems/mask_classes.py",
        "test_custom_masks",
        (
            "the upper bound is never drawn",
            "range(bound.low, bound.high + 1)",
            "range(bound.low, bound.high)",
        ),
        ("anything is a mask", "if not isinstance(drawn, Mask):", "if drawn is Ellipsis:"),
    ),
    *faults_of(
        "oracles/reference/torch_reference.py",
        "test_custom_masks",
        (
            "the oracle passes a predicate over",
            "seen[b] &= self._beyond.mask_mod",
            "seen[b] | self._beyond.mask_mod",
        ),
    ),
)
_STREAM = faults_of(
    "oracles/stream.py",
    "test_stream",
    ("uniform reaches 2", "device), 11).to", "device), 10).to"),
    (
        "the shift fills with the sign",
        "return (bits >> count) & ((1 << (64 - count)) - 1)",
        "return bits >> count",
    ),
    ("normal has a mean of half a step", "12 * 32767.5", "12 * 32768"),
    ("words are one stream", 'f"{name}/{word}"', 'f"{name}"'),
    ("normal takes a word twice", "device, (1, 2, 3))", "device, (1, 2, 2))"),
)
_OUTPUTS = faults_of(
    "oracles/outputs.py",
    "test_outputs",
    (
        "an accumulator of NaN passes",
        "if not getattr(self, name) >= 1:",
        "if getattr(self, name) < 1:",
    ),
    (
        "a number below 1 passes",
        "if not getattr(self, name) >= 1:",
        "if not getattr(self, name) > 0:",
    ),
)
_REFERENCE = faults_of(
    "oracles/reference/torch_reference.py",
    "test_reference",
    (
        "a gradient of lse has the other sign",
        "loss = loss + torch.where(live,",
        "loss = loss - torch.where(live,",
        "test_bounds_agree",
    ),
    (
        "a gradient of lse is that of the first rows",
        "dlse[:, :, here].to(torch.float64)",
        "dlse[:, :, : here.stop - here.start].to(torch.float64)",
        "test_lse_gradient",
    ),
    (
        "dout of empty rows takes part",
        "q, dout = (torch.where(live, x.to(torch.float64), 0.0) for x in (q, dout))",
        "q, dout = torch.where(live, q.to(torch.float64), 0.0), dout.to(torch.float64)",
    ),
    (
        "a key is used where all heads of a group see it",
        "H // Hk, N, 1).any(2)",
        "H // Hk, N, 1).all(2)",
    ),
    (
        "hidden pairs stay in the gradient",
        "torch.where(seen, e_bhmn / l_bhm1, 0.0)",
        "e_bhmn / l_bhm1",
    ),
    ("dk is that of the last chunk", "results.dk.add_(part.dk)", "results.dk.copy_(part.dk)"),
    (
        "lse lacks the maximum",
        "torch.where(live, m_bhm1 + l_bhm1.detach().log(), -math.inf)",
        "torch.where(live, l_bhm1.detach().log(), -math.inf)",
    ),
    (
        "the left end is exclusive",
        "seen & (n >= position - self._left)",
        "seen & (n > position - self._left)",
    ),
    (
        "any mask is taken for a Mask",
        "isinstance(mask, Mask) and type(mask).dense is Mask.dense",
        "isinstance(mask, Mask)",
        "test_closed_form test_reference",
    ),
    ("no rows are a chunk", "if rows < 1:", "if rows < 0:"),
    (
        "heads of a group are interleaved",
        "(x.repeat_interleave(H // Hk, dim=1) for x in (k, v))",
        "(x.repeat(1, H // Hk, 1, 1) for x in (k, v))",
    ),
    ("lse of empty rows is 0", "l_bhm1.detach().log(), -math.inf)", "l_bhm1.detach().log(), 0.0)"),
)
_CONSTANTS = faults_of(
    "oracles/bounds/constants.py",
    "test_bounds_agree test_error_model",
    (
        "exp errs by half",
        "u_exp=2.0**-51 if double else 2.0**-22",
        "u_exp=2.0**-51 if double else 2.0**-23",
    ),
    (
        "log errs by half",
        "u_log=2.0**-51 if double else 2.0**-22",
        "u_log=2.0**-51 if double else 2.0**-23",
    ),
    ("fp16 loses twice as much to underflow", "(2.0**-11, 2.0**-25,", "(2.0**-11, 2.0**-24,"),
    ("bf16 has a digit more", '"bf16": (2.0**-8,', '"bf16": (2.0**-9,'),
    ("TF32 truncates one operand", "return 2 * self.u_x + self.u_x**2", "return self.u_x"),
    (
        "a cast operand is not truncated",
        "return self.u_p + self.u_dot + self.u_p * self.u_dot",
        "return self.u_p",
    ),
    ("float64's bound is not doubled", "times=2.0 if double else 1.0", "times=1.0"),
    (
        "two roundings underflow once",
        "math.expm1(rounds * math.log1p(u_p)), rounds * eta_p",
        "math.expm1(rounds * math.log1p(u_p)), eta_p",
    ),
    (
        "two roundings are one",
        "math.expm1(rounds * math.log1p(u_p)), rounds * eta_p",
        "u_p, rounds * eta_p",
    ),
    (
        "TF32 concerns every dtype",
        'numerics.dots == "tf32" and in_dtype == "fp32"',
        'numerics.dots == "tf32"',
    ),
    ("a short dot is as short as it is", "float(max(D, _SHORTEST_DOT))", "float(D)"),
    ("gamma is of first order", "return n * self.u / (1 - n * self.u)", "return n * self.u"),
    ("bf16 reaches half as far", "(2 - 2.0**-7) * 2.0**127", "(2 - 2.0**-7) * 2.0**126"),
    (
        "what underflow costs is the smaller",
        "lost * max(math.log(2), split)",
        "lost * min(math.log(2), split)",
    ),
    (
        "a flushed operand is scaled for free",
        "self.eta_op * max(1.0, sm_scale / math.log(2))",
        "self.eta_op",
    ),
    (
        "the accumulator's h is ignored",
        "return n * (self.h * self.u) / (1 - n * (self.h * self.u))",
        "return n * self.u / (1 - n * self.u)",
    ),
    ("a P of fp32 is one of the inputs' dtype", '"fp32" if uncast else in_dtype', "in_dtype"),
)
_FORWARD = faults_of(
    "oracles/bounds/forward.py",
    "test_bounds_agree test_error_model",
    (
        "flushed rescales are free",
        "steps = scores.tiles + 1",
        "steps = 0 * scores.tiles + 1",
    ),
    (
        "a part that is flushed loses its weight or its sum",
        "2 * scores.tiles.clamp(max=numerics.splits)",
        "scores.tiles.clamp(max=numerics.splits)",
    ),
    (
        "parts without tiles are flushed",
        "2 * scores.tiles.clamp(max=numerics.splits)",
        "2 * numerics.splits",
    ),
    (
        "what is not split is merged",
        "    if numerics.splits > 1:\n        steps",
        "    if numerics.splits >= 1:\n        steps",
    ),
    (
        "a part starts where the row does",
        "range(tile_max.shape[2] if splits > 1 else 1)",
        "range(1)",
    ),
    ("the merge of a part is exact", "torch.minimum(most + 1, live", "torch.minimum(most, live"),
    (
        "tiles that are hidden can be merged",
        "live_tiles.sum(2) - 1)",
        "torch.full_like(most, live_tiles.shape[2]) - 1)",
    ),
    ("the subtraction of the maximum is free", ".mul_(3 * c.u))\n", ".mul_(0 * c.u))\n"),
    ("scores are rounded once less", "alpha=5 * c.u", "alpha=4 * c.u"),
    ("the second prescaled operand is free", "2 * c.u_in + c.u_in**2", "c.u_in"),
    (
        "near ties are no changes of the maximum",
        "earlier - slack.unsqueeze(2)",
        "earlier + slack.unsqueeze(2)",
    ),
    (
        "rescales are counted from the left alone",
        ").amax(0)\n    if splits",
        ").amin(0)\n    if splits",
    ),
    ("P underflows by more than its row's maximum", ".exp_().clamp_(max=1.0)", ".exp_()"),
    ("P does not underflow", "torch.full_like(m, c.eta_p + c.ftz)", "torch.full_like(m, c.ftz)"),
    (
        "the accumulator does not flush",
        "torch.full_like(m, c.eta_p + c.ftz)",
        "torch.full_like(m, c.eta_p)",
    ),
    (
        "the kernel's own sum is the true one",
        "Z = (p * (-E).exp_()).sum(2, keepdim=True)",
        "Z = p.sum(2, keepdim=True)",
    ),
    (
        "l is summed of the unrounded P, whatever is declared",
        'if numerics.l_from == "rounded":',
        'if numerics.l_from == "cast":',
    ),
    (
        "half of the steps of lse are free",
        "+ 4 * c.u * (torch.maximum(m.abs(), lse.abs())",
        "+ 2 * c.u * (torch.maximum(m.abs(), lse.abs())",
    ),
    ("a negative lse is not rounded", "torch.maximum(m.abs(), lse.abs())", "torch.maximum(m, lse)"),
    ("the division by the sum is free", "(gamma_l + 4 * c.u).unsqueeze(2)", "gamma_l.unsqueeze(2)"),
    (
        "the cheap spread lacks |out|",
        "return weights @ v.abs() + weights.sum(2, keepdim=True) * out.abs()",
        "return weights @ v.abs()",
        "test_error_model",
    ),
    ("the spread is signed", "- out[:, here].unsqueeze(2)).abs_()", "- out[:, here].unsqueeze(2))"),
    (
        "a maximum of before costs no longer exponents",
        "error.add_((3 * c.u * lag).unsqueeze(2))",
        "error",
    ),
    (
        "a maximum of before costs no longer logarithms",
        "scores.log_l.abs() + scores.lag",
        "scores.log_l.abs()",
    ),
    ("a maximum of before is as large as the row's", "lse.abs()) + scores.lag)", "lse.abs()))"),
    ("a first tile has one before", "* (tiles > 1).to", "* (tiles > 0).to"),
    (
        "a sum tile by tile is one of all keys",
        'added = numerics.block_n if numerics.l_order == "tile" else keys',
        "added = keys",
    ),
    (
        "normalised and not are exchanged",
        "if not numerics.p_normalised:",
        "if numerics.p_normalised:",
    ),
    (
        "hidden tiles count",
        "tiles = live_tiles.sum(2, dtype=torch.float64)",
        "tiles = torch.full_like(m, live_tiles.shape[2])",
    ),
    (
        "the stored out is not rounded",
        "out_bound = core + c.u_in * (out.abs() + core) + c.eta_in",
        "out_bound = core + c.eta_in",
    ),
    (
        "TF32 loses nothing of subnormal values",
        "core = core + c.eta_dot * p_grown.sum(2, keepdim=True) / Z",
        "core = core + 0.0",
    ),
    ("the slack of a tie is one score's", "2 * error.amax(2),", "error.amax(2),"),
    (
        "a prescaled k costs what a prescaled q does",
        'if prescales in ("k", "qk"):\n        error += c.eta_prescaled(prescales, t) * x.q.abs()',
        'if prescales in ("k", "qk"):\n        error += c.eta_prescaled(prescales, t) * x.k.abs()',
    ),
    (
        "the reach of a score is scaled",
        "return Scores(s, reach, p,",
        "return Scores(s, reach * sm_scale, p,",
        "test_error_model",
    ),
    ("TF32 keeps the digits of a score's reach", " + 5 * c.u * c.u_dot", ""),
    (
        "hidden pairs lose what underflows",
        "per_v = torch.where(x.seen, p_grown",
        "per_v = torch.where(x.seen | True, p_grown",
    ),
    (
        "P's rounding is not spread by its error",
        "p_grown * (rounding.unsqueeze(2) / Z)",
        "p * (rounding.unsqueeze(2) / Z)",
    ),
)
_BACKWARD = faults_of(
    "oracles/bounds/backward.py",
    "test_bounds_agree test_error_model",
    (
        "a gradient of lse is added to delta",
        "        delta -= dlse\n",
        "        delta += dlse\n",
    ),
    (
        "a gradient of lse is no term",
        "        delta_terms += dlse.abs()\n",
        "",
        "test_lse_gradient",
    ),
    (
        "taking a gradient of lse off is exact",
        "c.u * (delta.abs() + dlse.abs()) + 2 * c.eta_op",
        "2 * c.eta_op",
    ),
    (
        "a gradient of lse is not flushed",
        "c.u * (delta.abs() + dlse.abs()) + 2 * c.eta_op",
        "c.u * (delta.abs() + dlse.abs())",
    ),
    (
        "flushed products of delta are free",
        "(2 * x.v.shape[2] + operands",
        "(0 * x.v.shape[2] + operands",
    ),
    (
        "flushed operands of delta are free",
        "2 * x.v.shape[2] + operands.sum(2, keepdim=True)",
        "2 * x.v.shape[2]",
    ),
    (
        "delta's operands are those of a perfect kernel",
        "abs_dout + fwd.out.abs() + fwd.out_bound",
        "abs_dout + fwd.out.abs()",
    ),
    (
        "flushed sums of dq are free",
        "dq_bound += (lost_sum * tiles + c.eta_op)",
        "dq_bound += (0 * tiles + c.eta_op)",
    ),
    ("delta reads a perfect out", "delta_error = out_error + c.gamma(", "delta_error = c.gamma("),
    (
        "delta's sum is as long as the row",
        "c.gamma(float(x.v.shape[2] + 4))",
        "c.gamma(float(x.v.shape[2]))",
    ),
    (
        "the subtraction of delta is free",
        ".mul_(3 * c.u).add_(subtrahends)",
        ".mul_(0 * c.u).add_(subtrahends)",
    ),
    ("dS does not flush", ".add_(flushed.add_(1.0), alpha=c.ftz)", ""),
    ("a rounded P makes the same dS", "    if p_rounded:", "    if p_rounded and False:"),
    ("a large scale narrows what dS loses", "(max(1.0, 1 / sm_scale) if", "(1 / sm_scale if"),
    (
        "dq is added without error",
        "per_product = c.g((numerics.block_n + 2) * tiles) * (1 + c.u_cast) + again_k",
        "per_product = again_k + 0 * tiles",
    ),
    (
        "the prescaled operands are exchanged",
        'again_q = c.u_in if numerics.prescales in ("q", "qk")',
        'again_q = c.u_in if numerics.prescales in ("k", "qk")',
    ),
    ("P of dv is not cast", "(grads.p_growth + c.u_cast * grads.p_grown)", "grads.p_growth"),
    ("P of dv does not underflow", ".add_((c.eta_p + c.ftz) * (1 + c.u_x))", ""),
    (
        "dk is added of exact dS",
        "dk_products=(grads.ds_reach.mT @ abs_q)",
        "dk_products=(abs_ds.mT @ abs_q)",
    ),
    (
        "P is recomputed from a perfect lse",
        "per_row = fwd.lse_bound.unsqueeze(2) + 3 * c.u * lse.abs() + c.u_exp",
        "per_row = 3 * c.u * lse.abs() + c.u_exp",
    ),
    (
        "the reach of dq cancels",
        "dq_reach=abs_ds @ abs_k",
        "dq_reach=grads.ds @ x.k",
        "test_error_model",
    ),
    ("hidden pairs underflow into dv", "    dv_weights.masked_fill_(x.hidden, 0.0)\n", ""),
    (
        "hidden pairs underflow into dS",
        ".add_(eta_ds).masked_fill_(x.hidden, 0.0)",
        ".add_(eta_ds)",
    ),
    ("dS is not cast", "e.add_(ds_reach, alpha=c.u_cast)", "e"),
    (
        "terms of dS lack delta",
        "scores.p * (dp_reach + delta_terms)",
        "scores.p * dp_reach",
        "test_error_model",
    ),
    ("dk's errors cancel", "abs_q, abs_k, abs_dout = x.q.abs(),", "abs_q, abs_k, abs_dout = x.q,"),
    (
        "the reach of dq is scaled",
        "dq_reach=abs_ds @ abs_k",
        "dq_reach=sm_scale * (abs_ds @ abs_k)",
        "test_error_model",
    ),
    (
        "the reach of dk is scaled",
        "dk_reach=abs_ds.mT @ abs_q",
        "dk_reach=sm_scale * (abs_ds.mT @ abs_q)",
        "test_error_model",
    ),
    (
        "the reach of dk cancels",
        "dk_reach=abs_ds.mT @ abs_q",
        "dk_reach=(grads.ds.mT @ x.q).abs()",
        "test_error_model",
    ),
    (
        "a prescaled q that is used again does not underflow",
        "dk_errors += eta_again",
        "dk_errors += 0 * eta_again",
    ),
    (
        "P of dv does not flush",
        "add_((c.eta_p + c.ftz) * (1 + c.u_x))",
        "add_(c.eta_p * (1 + c.u_x))",
    ),
    (
        "the reach of dP cancels",
        "dp_reach = (abs_dout @ x.v.abs().mT)",
        "dp_reach = (x.dout @ x.v.mT).abs()",
    ),
)
_MODEL = faults_of(
    "oracles/bounds/error_model.py",
    "test_error_model test_bounds_agree",
    (
        "flushed sums of keys are free",
        "max(1.0, sm_scale) * sums.query_tiles + 1",
        "0 * sums.query_tiles + 1",
    ),
    ("NaN is in range", "if not value <= limit:", "if value > limit:"),
    ("everything is out of range", "if not value <= limit:", "if not value >= limit:"),
    ("an lse of 1e6 is in range", "_LARGEST_LSE = 1e5", "_LARGEST_LSE = 1e6"),
    ("dS may overflow", '        ("|dS| + its error", ds, c.max_p),\n', ""),
    (
        "out may round to infinity",
        '("|out| + bound", out, c.max_in)',
        '("|out| + bound", out, c.max_acc)',
    ),
    (
        "dv may round to infinity",
        '("|dv| + bound", dv_stored, c.max_in)',
        '("|dv| + bound", dk_stored, c.max_in)',
    ),
    (
        "a key's chain counts tiles for rows",
        "c.g(_QUERY_TILE * sums.query_tiles + 2)",
        "c.g(sums.query_tiles + 2)",
    ),
    ("the range is that of the last chunk", "torch.stack(peaks).amax(0)", "peaks[-1]"),
    (
        "heads stored apart are added exactly",
        "added = c.u_in * apart * _by_group(value.abs() + bound, apart).sum(1) + c.eta_in",
        "added = torch.full_like(_by_group(bound, apart).sum(1), c.eta_in)",
    ),
    (
        "a stored gradient does not underflow",
        "return bound + u * (value.abs() + bound) + eta",
        "return bound + u * (value.abs() + bound)",
    ),
    (
        "a stored gradient is not rounded",
        "return bound + u * (value.abs() + bound) + eta",
        "return bound + eta",
    ),
    (
        "lse of an empty row may err",
        "(c.times * fwd.lse_bound).masked_fill_(x.empty, 0.0)",
        "c.times * fwd.lse_bound",
    ),
    (
        "dq is not scaled",
        "_finish(bwd.dq_bound, bwd.dq, c.u_in + 4 * c.u, c.eta_in)",
        "_finish(bwd.dq_bound, bwd.dq, c.u_in, c.eta_in)",
    ),
    (
        "the bounds of keys are not doubled",
        "finished.append((value, c.times * bound, terms))",
        "finished.append((value, bound, terms))",
    ),
    ("the peaks of keys are exchanged", "for _ in of_keys.peaks][::-1]", "for _ in of_keys.peaks]"),
    ("a chunk ends inside a tile", "    height += -height % _QUERY_TILE\n", ""),
    ("keys that no row sees may err", "        bound.masked_fill_(unseen, 0.0)\n", ""),
    (
        "rows that see nothing are read",
        "unread, unseen = empty.unsqueeze(2),",
        "unread, unseen = empty.unsqueeze(2) & False,",
    ),
    (
        "a group's heads are one",
        'apart = H // Hk if numerics.group_sum == "dtype" else 1',
        "apart = 1",
    ),
    (
        "the unnormalised sum is normalised",
        "unnormalised = fwd.out_terms * (scores.log_l + scores.lag).exp().unsqueeze(2)",
        "unnormalised = fwd.out_terms",
    ),
    (
        "sums fit relative to the row's own maximum",
        "(scores.log_l + scores.lag)",
        "scores.log_l",
    ),
    ("dq is stored without its error", "bwd.dq.abs() + rows.bound_dq", "bwd.dq.abs()"),
    ("dk is stored without its error", "dk.abs() + bound_dk", "dk.abs()"),
    ("dv is stored without its error", "dv.abs() + bound_dv", "dv.abs()"),
    ("out is stored without its error", "fwd.out.abs() + rows.bound_out", "fwd.out.abs()"),
    (
        "a key's tile counts where all of its rows see the key",
        "tiled.any(2).sum(1,",
        "tiled.all(2).sum(1,",
    ),
    (
        "terms of lse are 1",
        "terms_lse=1 + scores.m.abs() + scores.log_l.abs()",
        "terms_lse=torch.ones_like(scores.m)",
    ),
)
_NUMPY_REFERENCE = faults_of(
    "oracles/reference/numpy_reference.py",
    "test_numpy_reference",
    ("the diagonal is one key ahead", "level = keys - 1 - rows_below", "level = keys - rows_below"),
    (
        "a window may begin before the first key",
        "first = max(first, level - mask.window_left)",
        "first = level - mask.window_left",
    ),
    (
        "dlse is added to delta",
        "(dout_me * out_me).sum(axis=1) - dlse_m",
        "(dout_me * out_me).sum(axis=1) + dlse_m",
        "test_numpy_reference test_numpy_bound",
    ),
    (
        "dk is that of the last head",
        "result.dk[b, g] += head.dk_nd",
        "result.dk[b, g] = head.dk_nd",
    ),
    (
        "the dout of empty rows takes part",
        "dout_me = np.where(live_m[:, None], dout_me, 0.0)",
        "dout_me = np.array(dout_me)",
    ),
    (
        "hidden dS is multiplied instead of selected",
        "dscores_mn = np.where(seen_mn, probs_mn * (dprobs_mn - delta_m[:, None]), 0.0)",
        "dscores_mn = probs_mn * (dout_me @ v_ne.T - delta_m[:, None])",
    ),
    ("dq lacks the scale", "dq_md = sm_scale * (dscaled_mn @ k_nd)", "dq_md = dscaled_mn @ k_nd"),
)
_NUMPY_BOUND = faults_of(
    "oracles/bounds/numpy_check.py",
    "test_numpy_bound_by_hand test_bounds_agree test_numpy_bound",
    (
        "a flushed division is free",
        "units.flush_op * tiles + units.flush_op",
        "units.flush_op * tiles",
    ),
    (
        "a flushed dS is free",
        "(units.eta_cast + units.flush_op) * (1 + units.u_x)",
        "units.eta_cast * (1 + units.u_x)",
    ),
    ("flushed keys are free", "_stored(sum(bounds, flushed)", "_stored(sum(bounds, 0 * flushed)"),
    (
        "the subtraction of the maximum rounds twice",
        "+ 3 * u * np.abs(s_mn - head.row_max_m[:, None])",
        "+ 2 * u * np.abs(s_mn - head.row_max_m[:, None])",
    ),
    (
        "scores are rounded once less",
        "+ 5 * u * np.abs(s_mn)",
        "+ 4 * u * np.abs(s_mn)",
    ),
    ("a rounded P makes the same dS", "    if from_rounded:", "    if from_rounded and False:"),
    (
        "a gradient of lse is free",
        "error_delta_m += u * (np.abs(head.delta_m) + np.abs(head.dlse_m))",
        "error_delta_m += 0 * u",
    ),
    (
        "heads stored apart are added exactly",
        "total + len(bounds) * units.u_stored * largest + eta",
        "total + eta",
    ),
    (
        "a prescaled k is exact when used again",
        "bound_dq_md += t * units.u_stored * (top_mn @ k_nd) + reused * top_mn.sum(1)[:, None]",
        "bound_dq_md += reused * top_mn.sum(1)[:, None]",
    ),
    (
        "P underflows by more than its row's maximum",
        "np.exp(min(0.0, row_max - lse + 2 * error_n.max()))",
        "np.exp(row_max - lse + 2 * error_n.max())",
    ),
    ("float64's bound is not doubled", "Outputs(*(2 * x for x in result))", "Outputs(*result)"),
    ("the kernel's own sum is the true one", "z = (p_n * np.exp(-error_n)).sum()", "z = p_n.sum()"),
    ("one chain runs through one head", "rows_n if per_head else len(heads) * rows_n", "rows_n"),
    (
        "lse is not rounded where it is negative",
        "max(abs(row_max), abs(lse))",
        "max(row_max, lse)",
    ),
    (
        "P is recomputed from a perfect lse",
        "error_mn + bound_lse_m[:, None] + 3 * u * magnitudes_mn",
        "error_mn + 3 * u * magnitudes_mn",
    ),
    (
        "the accumulator does not flush",
        "(units.eta_cast + units.flush) * spread",
        "units.eta_cast * spread",
    ),
    (
        "P of dv does not flush",
        "underflow = (units.eta_cast + units.flush)",
        "underflow = units.eta_cast",
    ),
    (
        "a part that is flushed loses its weight or its sum",
        "units.flush_op * 2 * parts",
        "units.flush_op * parts",
    ),
    (
        "parts without tiles are flushed",
        "parts = min(float(numerics.splits), tiles)",
        "parts = numerics.splits",
    ),
    ("dS does not flush", "+ units.flush * (1 + terms_mn)", "+ 0 * terms_mn"),
    (
        "flushed operands of delta are free",
        "units.flush_op * (operands_me + 2)",
        "units.flush_op * (0 * operands_me + 2)",
    ),
)
_NUMPY_UNITS = faults_of(
    "oracles/bounds/numpy_units.py",
    "test_numpy_bound_by_hand test_bounds_agree",
    (
        "rescales are counted from the left alone",
        "changes(tile_max, slack), changes(tile_max[::-1], slack)",
        "changes(tile_max, slack), 0",
    ),
    ("a part starts where the row does", "for first in range(tiles):", "for first in range(1):"),
    ("the merge of a part is exact", "return min(most + 1,", "return min(most,"),
    ("a part of all tiles is merged", "min(most + 1, tiles - 1)", "most + 1"),
    ("what is not split is merged", "if numerics.splits == 1 else", "if numerics.splits == 0 else"),
    ("a first tile has one before", "numerics.block_n) > 1", "numerics.block_n) > 0"),
    (
        "a threshold is of natural exponents",
        "numerics.rescale_threshold * math.log(2.0)",
        "numerics.rescale_threshold",
    ),
    ("what underflow costs is the smaller", "factor = max(ln2,", "factor = min(ln2,"),
    (
        "hidden tiles count",
        "seen_mn[:, start : start + width].any(axis=1)",
        "np.ones(len(count_m))",
    ),
    (
        "the accumulator's h is ignored",
        "self.gamma(self.accumulator * np.asarray(n, dtype=np.float64))",
        "self.gamma(np.asarray(n, dtype=np.float64))",
    ),
    ("two roundings are one", "float(np.expm1(r * np.log1p(u_p)))", "u_p"),
    (
        "a tie is no change",
        "changes += here >= running - slack",
        "changes += here > running + slack",
    ),
    ("fp32 has a digit less", '"fp32": (2.0**-24,', '"fp32": (2.0**-23,'),
)
_VARIANCE = faults_of(
    "oracles/bounds/variance.py",
    "test_variance",
    (
        "a gradient of lse changes no spread",
        "        delta = delta - x.dlse\n",
        "        pass\n",
        "test_lse_gradient",
    ),
    ("a rounding errs by half its spacing", "half_spacing.square() / 3", "half_spacing.square()"),
    (
        "subnormal numbers have as many digits",
        "(power * (u / 2)).clamp(min=eta)",
        "power * (u / 2)",
    ),
    (
        "zeros are rounded",
        "torch.where(x == 0, 0.0, half_spacing.square() / 3)",
        "half_spacing.square() / 3",
    ),
    ("errors of the scores do not reach dS", "ds_cast + fwd.p_scores * gap.square()", "ds_cast"),
    (
        "delta reads an out that is not rounded",
        "    delta_errors += (x.dout.square() * stored).sum(3, keepdim=True)\n",
        "",
    ),
    (
        "a scaled dS is cast at its own scale",
        "rounding(ds * factor, c.u_p, c.eta_p)",
        "rounding(ds, c.u_p, c.eta_p)",
    ),
    (
        "heads stored apart are added exactly",
        "total += grouped(rounding(gradient, c.u_in, c.eta_in))",
        "total += 0.0",
    ),
    ("the largest P is rounded", "torch.where(e == 1, 0.0, e)", "e"),
    ("delta's errors do not reach dk", " + p_dtanh.square() * delta_errors\n", "\n"),
    ("delta's errors do not reach dq", " + delta_errors * (p_dtanh @ x.k).square()\n", "\n"),
    (
        "lse is exact",
        "row_p = p_cast.sum(3, keepdim=True) + fwd.lse",
        "row_p = p_cast.sum(3, keepdim=True)",
    ),
    ("P of dv is not cast", "(p_cast + fwd.p_scores).mT @ dout2", "fwd.p_scores.mT @ dout2"),
    (
        "every declared rounding is the same one",
        "p_cast = p_cast * numerics.ds_roundings\n",
        "p_cast = p_cast * 1\n",
    ),
    (
        "sums are those of the last chunk",
        "part if sums is None else _Sums(*map(torch.Tensor.add_, sums, part))",
        "part",
    ),
    (
        "the sum of the rounded P feels its rounding",
        'if numerics.l_from == "rounded":\n        centred',
        'if numerics.l_from == "cast":\n        centred',
    ),
    (
        "padding keys are read",
        "(torch.where(used, x.to(torch.float64), 0.0) for x in (k, v))",
        "(x.to(torch.float64) for x in (k, v))",
    ),
)

_SOFTCAP = (
    *faults_of(
        "oracles/reference/softcap.py",
        "test_softcap",
        ("the slope cancels", "y.sign() * (1 - 2 * e / (1 + e))", "y.tanh()"),
        ("a cap is not symmetric", "y.sign() * (1 - 2", "(1 - 2"),
        (
            "the slope is that of half the score",
            "torch.exp(-2 * (x / softcap)",
            "torch.exp(-(x / softcap)",
        ),
    ),
    *faults_of(
        "oracles/bounds/softcap.py",
        "test_softcap",
        (
            "the product with the scale is free",
            "error + 3 * c.u * x.abs()",
            "error + 0 * c.u * x.abs()",
        ),
        ("errors are not contracted", "moved = steepest * of_x", "moved = of_x"),
        (
            "the steepest slope is that of the true score",
            "slope((x.abs() - of_x).clamp_(min=0.0), softcap)",
            "slope(x, softcap)",
        ),
        ("tanh is exact", "(12 * c.u + c.u_exp) * (s.abs()", "(3 * c.u) * (s.abs()"),
        ("a product with the cap does not flush", " + 2 * softcap * c.ftz", ""),
        (
            "the slope of another score is the same",
            "(of_x * (2 / softcap)).clamp_(max=1.0)",
            "0 * of_x",
        ),
        (
            "the slope may be steeper than 1",
            "(of_x * (2 / softcap)).clamp_(max=1.0)",
            "of_x * (2 / softcap)",
        ),
        ("the slope is exact", "of_slope += 14 * c.u + c.u_exp", "of_slope += 0 * c.u"),
        (
            "the exponent of the slope is exact",
            " + 4 * c.u * (x.abs() / softcap).clamp_(max=_FLAT)",
            "",
        ),
        ("the slope does not flush", "steepest * of_slope + 4 * c.ftz", "steepest * of_slope"),
    ),
    *faults_of(
        "oracles/reference/torch_reference.py",
        "test_softcap",
        ("scores are never capped", "if softcap is not None:", "if False:"),
    ),
    *faults_of(
        "oracles/bounds/forward.py",
        "test_softcap",
        (
            "capped scores err as plain ones do",
            "s, error, slope, slope_error = cap",
            "s, _, slope, slope_error = cap",
        ),
    ),
    *faults_of(
        "oracles/bounds/backward.py",
        "test_softcap",
        ("dS has no slope", "ds, ds_terms = ds * scores.slope,", "ds, ds_terms = ds,"),
        ("terms of dS have no slope", "ds_terms * scores.slope", "ds_terms"),
        (
            "the slope's error is free",
            "ds.abs() * (scores.slope_error + c.u * grown)",
            "ds.abs() * c.u * grown",
        ),
        (
            "the product with the slope is exact",
            "(scores.slope_error + c.u * grown)",
            "scores.slope_error",
        ),
        ("the product with the slope does not flush", "+ c.u * grown) + c.ftz", "+ c.u * grown)"),
    ),
    *faults_of(
        "oracles/reference/numpy_reference.py",
        "test_softcap",
        ("capped scores have the slope of plain ones", "** -2.0", "** -0.0"),
        ("the slope is a cosine's inverse", "** -2.0", "** -1.0"),
    ),
    *faults_of(
        "oracles/bounds/numpy_check.py",
        "test_softcap",
        ("capped scores are exact", "error_mn, _ = _capped_error(", "_ = _capped_error("),
        ("tanh is exact", "(3 * u + (9 * u + units.u_exp))", "(3 * u)"),
        ("the slope is exact", "relative_mn + 14 * u + units.u_exp", "relative_mn"),
        ("the exponent of the slope is exact", " + 2 * u * exponent_mn", ""),
        (
            "the product with the slope is exact",
            "e_mn + u * largest_mn + units.flush",
            "e_mn + units.flush",
        ),
    ),
    *faults_of(
        "oracles/bounds/variance.py",
        "test_softcap",
        ("dq has the spread of a plain one", "p_dtanh = p * fwd.slope", "p_dtanh = p"),
        ("the spread of dS has no slope", "gap, ds = gap * fwd.slope, ds * fwd.slope", "pass"),
    ),
)

_ADDITIONS = (
    *faults_of(
        "oracles/reference/score_mods.py",
        "test_alibi",
        ("positions lack what the lengths differ by", "(m + self._ahead - n)", "(m - n)"),
        ("keys gain with distance", "-self._slopes * distance", "self._slopes * distance"),
        ("distances have a sign", "self._ahead - n).abs()", "self._ahead - n)"),
        ("all chunks are the first", "torch.arange(start, stop,", "torch.arange(stop - start,"),
    ),
    *faults_of(
        "oracles/bounds/forward.py",
        "test_alibi",
        (
            "a negative score is no score",
            "    parts = s.abs()\n",
            "    parts = s\n",
            "test_error_model test_alibi",
        ),
        ("sums are exact", "(3 + len(x.added)) * c.u * parts", "0 * parts"),
        ("each sum is the last", "(3 + len(x.added)) * c.u", "3 * c.u"),
        ("terms cancel", "sum(map(torch.abs, x.added), parts)", "s.abs()"),
    ),
    *faults_of(
        "oracles/bounds/error_model.py",
        "test_alibi",
        ("any terms are in range", "if largest <= _LARGEST_TERMS:", "if True:"),
        ("the largest score has no terms", "        scores.parts,\n", "        scores.s.abs(),\n"),
    ),
    *faults_of(
        "oracles/bounds/numpy_check.py",
        "test_alibi",
        ("sums are exact", "(2 + terms + 1) * units.u", "0 * units.u"),
        ("terms cancel", "total_mn = total_mn + np.abs(term_mn)", "pass"),
    ),
    *faults_of(
        "oracles/reference/numpy_reference.py",
        "test_alibi",
        ("the level is a row lower", "level = keys - (rows - m)", "level = keys - (rows - m) + 1"),
    ),
    *faults_of(
        "oracles/bounds/variance.py",
        "test_alibi",
        ("nothing is added to what is rounded", "sum(added, s), torch.where", "s, torch.where"),
    ),
    *faults_of(
        "properties/inputs/tensors.py",
        "test_alibi",
        (
            "nothing odd lies between slopes",
            "torch.stack([values, _cast(others",
            "torch.stack([values, _cast(torch.zeros_like(others)",
        ),
    ),
)

_BIAS = (
    *faults_of(
        "oracles/reference/score_mods.py",
        "test_bias",
        (
            "all chunks have the first rows' bias",
            "self._bias[:, :, start:stop]",
            "self._bias[:, :, : stop - start]",
        ),
    ),
    *faults_of(
        "oracles/reference/torch_reference.py",
        "test_bias",
        ("dbias is that of the last chunk", "dbias += of_bias", "dbias = of_bias"),
    ),
    *faults_of(
        "oracles/bounds/bias.py",
        "test_bias",
        (
            "what shares an element is as exact as one",
            "error + c.gamma(count + 2) * reach",
            "error",
        ),
        (
            "errors cancel",
            "gradient.ds.abs() + gradient.error, gradient.terms",
            "gradient.ds + gradient.error, gradient.terms",
        ),
        (
            "dbias is stored exactly",
            "bound + stored.u_in * (ds.abs() + bound) + stored.eta_in",
            "bound",
        ),
        (
            "the bias has the dtype of q",
            "constants(bias_dtype, Numerics())",
            "constants(in_dtype, Numerics())",
        ),
        ("what nobody sees may err", ".masked_fill_(count == 0, 0.0)", ""),
        ("any gradient is in range", "if not largest <= stored.max_in:", "if False:"),
        ("float64 oracles are exact", "(c.times * bound)", "(1.0 * bound)"),
    ),
    *faults_of(
        "oracles/bounds/numpy_bias.py",
        "test_bias",
        ("sums are exact", "units.gamma(count + 2) * size", "0 * size"),
        (
            "every pair is one of the first entry",
            "(b, h, m, n), bias.shape",
            "(0, h, m, n), bias.shape",
        ),
    ),
    *faults_of(
        "properties/checks/bias_gradient.py",
        "test_bias",
        ("NaN passes", "bad = ratio > 1", "bad = (got - want).abs() > limit"),
        (
            "nothing is beyond the bound",
            "    return [\n        Finding.at(",
            "    return [] and [\n        Finding.at(",
        ),
    ),
    *faults_of(
        "properties/problems/batched.py",
        "test_bias",
        ("what is shared is stacked", "if most < 2 or shares or", "if most < 2 or"),
    ),
    *faults_of(
        "properties/inputs/tensors.py",
        "test_bias",
        ("a hidden bias is clean", "    if stands != 0:\n", "    if stands != stands and False:\n"),
        (
            "every bias is contiguous",
            "BIAS_LAYOUTS[problem.all_seeds[0] % len(BIAS_LAYOUTS)]",
            "BIAS_LAYOUTS[0]",
        ),
    ),
)

ORACLES: tuple[Mutant, ...] = (
    *_SOFTCAP,
    *_BIAS,
    *_ADDITIONS,
    *_MASK,
    *_PROBLEM,
    *_CUSTOM,
    *_STREAM,
    *_OUTPUTS,
    *_REFERENCE,
    *_CONSTANTS,
    *_FORWARD,
    *_BACKWARD,
    *_MODEL,
    *_NUMPY_REFERENCE,
    *_NUMPY_BOUND,
    *_NUMPY_UNITS,
    *_VARIANCE,
)
