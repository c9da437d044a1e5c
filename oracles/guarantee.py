"""The guarantees of a correct kernel, as values: a key, a title and a statement."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["GUARANTEES", "Guarantee", "guarantee_of", "named"]

# The guarantees by their first word, in the order of the documents.
GUARANTEES: dict[str, Guarantee] = {}


class Guarantee(str):
    """A statement that holds for a correct kernel. It is the text that findings begin with.

    Args:
        key: Its first word, such as "G8" or "RMS".
        heading: The words that follow the key in tables.
        statement: One or more sentences, which the table of docs/guarantees.md shows.
        promise: The key of the guarantee with which a kernel promises this one to the bit: its own,
            unless the comparison is one that another guarantee is about.
        text: The text; empty is the key and the heading.
    """

    __slots__ = ("heading", "key", "promise", "statement")

    key: str
    heading: str
    statement: str
    promise: str

    def __new__(
        cls, key: str, heading: str, statement: str, promise: str = "", text: str = ""
    ) -> Guarantee:
        """Create a guarantee, and enter it into ``GUARANTEES``."""
        self = super().__new__(cls, text or f"{key} {heading}")
        self.key, self.heading, self.statement = key, heading, statement
        self.promise = promise or key
        return GUARANTEES.setdefault(key, self)

    def __reduce__(self) -> tuple[type[Guarantee], tuple[str, ...]]:
        """Return what makes it again in another process."""
        return Guarantee, (self.key, self.heading, self.statement, self.promise, str(self))

    @property
    def row(self) -> str:
        """The key and the heading, as the row of a table."""
        return self.heading if self.key in self.heading.split() else f"{self.key} {self.heading}"


def guarantee_of(text: str) -> str:
    """Return the key of the guarantee that a text begins with: "G1" for "G1 accuracy"."""
    return text.partition(" ")[0]


def named(words: Iterable[str]) -> list[Guarantee]:
    """Return guarantees by key, by heading, or by both: "S1", "merging" or "S1 merging".

    Raises:
        ValueError: There is no guarantee of a name.
    """
    known = {name: x for x in GUARANTEES.values() for name in (x.heading, x.row, str(x), x.key)}
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ValueError(
            f"guarantees has {unknown}; needs keys or titles, some of "
            f"{', '.join(x.row for x in GUARANTEES.values())}"
        )
    return [known[word] for word in words]


G1 = Guarantee(
    "G1",
    "accuracy",
    "Every element of out, lse, dq, dk and dv lies within the [derived bound](error-bound.md) of "
    "the float64 oracle.",
)
G2 = Guarantee(
    "G2",
    "finite",
    "Finite inputs in range give no NaN and no Inf, however far the logits are shifted.",
)
G3 = Guarantee(
    "G3",
    "empty rows",
    "A row without a visible key gives out = 0, lse = -inf, dq = 0, and adds nothing to dk and dv. "
    "Its dout and the gradient of its lse are ignored.",
    promise="G10",
)
G4 = Guarantee(
    "G4",
    "dirty padding",
    "The contents of padding (NaN, Inf, the largest values, noise; in all tensors or one) change "
    "no bit elsewhere. The gradient of padding is exactly 0.",
)
G5 = Guarantee(
    "G5",
    "hidden positions",
    "A pair that the mask hides adds exactly nothing, to the row or to the key.",
)
G6 = Guarantee(
    "G6",
    "full overwrite",
    "Every element of every output is written, and nothing outside. Allocations start as NaN or as "
    "a number, between guard bands. Any set of the gradients has the bits of all of them together.",
)
G7 = Guarantee(
    "G7",
    "reads in bounds",
    "Nothing outside the tensors' own elements influences a result. `make sanitize` runs "
    "compute-sanitizer too.",
    promise="G10",
)
G8 = Guarantee(
    "G8",
    "layout",
    "Any strides, other ones for each tensor, give the bits of contiguous copies. So does a dout "
    "with stride 0, as the gradient of a sum or a mean of out has.",
)
G9 = Guarantee(
    "G9",
    "independence",
    "A batch entry, or a key/value head with its group, computed alone gives its part of the whole "
    "to the bit.",
)
G10 = Guarantee("G10", "repeatable", "The same inputs give the same bits, run after run.")
G11 = Guarantee("G11", "tiles", "Every tile configuration is within the bound.")
G12 = Guarantee(
    "G12",
    "range",
    "Elements 2**31 and more apart are read where they are (on a CPU in address space without "
    "memory). On a GPU, tensors of more than 2**31 elements or rows and B*H beyond 65,535 are "
    "right.",
    promise="G8",
)
G13 = Guarantee(
    "G13",
    "state",
    "The hundredth call gives the result of the first. Calls of other shapes in between change "
    "nothing. Calls that follow each other and differ in one argument give what each gives in a "
    "fresh state, every argument in turn.",
    promise="G10",
)
G14 = Guarantee(
    "G14",
    "errors",
    "A bad call that a kernel [declares](declarations.md#promises) to refuse raises an exception, "
    "and leaves its inputs as they are. The kernels of this repository name the argument.",
)
G15 = Guarantee(
    "G15",
    "streams",
    "A side stream, a call on another stream, other kernels on the multiprocessors and another "
    "current device change no result. A replay of a CUDA graph gives what a call on the same "
    "contents gives, after a thousand other calls too. On a GPU.",
    promise="G10",
)
G16 = Guarantee(
    "G16",
    "ways of calling",
    "The way of a call changes no result: without gradients, for some of the gradients alone, in a "
    "checkpoint, for inputs that were changed in place. Nor does a second backward, or one in "
    "another thread. Another call between its forward and backward changes nothing, nor does one "
    "in another thread, one that raised before it, or a change of out. Merges and calls with a "
    "cache are asked, too.",
    promise="G10",
)
I1 = Guarantee(
    "I1",
    "neighbours",
    "The bits of a batch entry depend neither on the number nor on the length of other entries.",
)
I2 = Guarantee(
    "I2",
    "chunks",
    "Queries in any chunks have the out and lse that they have in one call, to the bit. A chunk "
    "gets the keys that it sees, or all keys.",
)
I3 = Guarantee(
    "I3",
    "decoding",
    "Decoding over a cache, token by token or in chunks, gives the bits of one causal call.",
    promise="I2",
)
I4 = Guarantee("I4", "slices", "A slice of the heads has the bits that it has among all heads.")
I5 = Guarantee("I5", "forms", "Padding and packing change no bit.")
I6 = Guarantee(
    "I6",
    "inference",
    "The forward without gradients gives the bits of the forward of training. Kernels that do not "
    "declare it are held to the bound.",
)
Q1 = Guarantee(
    "Q1",
    "hidden codes",
    "Codes of 8 bits in padding, and those of a key that a row does not see, change no bit of the "
    "row while the scales stay the same.",
)
S1 = Guarantee(
    "S1",
    "merging",
    "Merged states lie within the derived bound, whatever the order and grouping of the parts. "
    "Parts that saw nothing change no bit. One part is the identity to the bit. Storage does not "
    "matter. An lse of NaN or +inf of a part that is not empty is not hidden. A ring over parts of "
    "the keys gives the attention to all keys.",
)
S2 = Guarantee(
    "S2",
    "conventions",
    "lse has the declared base, and the declared value where no part saw a key. The oracle of S1 "
    "reads the lses in the same convention.",
)
C1 = Guarantee(
    "C1",
    "pages",
    "The order and the size of pages, pages that entries share, and a contiguous cache change no "
    "bit.",
    promise="G10",
)
C2 = Guarantee(
    "C2",
    "free rows",
    "Free pages and rows, and unused places of the table, are neither read nor written.",
    promise="G10",
)
C3 = Guarantee(
    "C3",
    "append",
    "An append writes its rows and no other. Keys appended in one call, in several or before give "
    "the same bits.",
    promise="G10",
)
C4 = Guarantee(
    "C4",
    "far pages",
    "Pages that lie 2**31 elements or more apart are read and written where they are.",
    promise="G10",
)
C5 = Guarantee(
    "C5",
    "nothing cached",
    "Without a key in the cache, a place in the table or an entry, out is 0 and lse -inf.",
)
C6 = Guarantee(
    "C6",
    "places of codes",
    "Each element of a cache of codes takes its code and its scale from the place that the call "
    "names: page, row, head and channel.",
)
C7 = Guarantee(
    "C7",
    "codes written",
    "An append to a cache of codes writes the codes, and the scales of tokens, that the declared "
    "rule makes: ties, numbers beyond the range and zeros too, to the bit.",
)
T3 = Guarantee(
    "T3",
    "logic in float64",
    "In float64, an element errs by at most 1e-12 times the sum of its |terms|. Rounding is gone, "
    "and logic shows.",
)
RMS = Guarantee(
    "RMS",
    "square of errors",
    "On ordinary 16-bit data, the mean square of the errors equals the prediction for independent "
    "roundings.",
    text="RMS",
)
BIAS = Guarantee(
    "bias", "sign of errors", "On ordinary 16-bit data, errors prefer no sign.", text="bias"
)
LIMIT = Guarantee(
    "limit",
    "of elements",
    "On continuous data, every element, and the sums of a row, of a tile of 64 rows and of a whole "
    "output, lie within the [limit of independent "
    "roundings](error-bound.md#limits-of-independent-roundings).",
)
BACKWARD = Guarantee(
    "backward",
    "given the forward",
    "dq, dk, dv, dbias and dsinks are the gradients that follow from the out and lse that the "
    "kernel itself returned, within the [bound of the backward "
    "alone](error-bound.md#the-backward-given-the-forward).",
)
IDENTITIES = Guarantee(
    "identities",
    "of dk and dv",
    "The sums of dk and dv, which are known exactly, are right as closely as roundings allow.",
    text="identities",
)
EXACT = Guarantee(
    "exact",
    "exact closed forms",
    "With k = 0, one-hot values read the mask back, v = 1 gives out = 1, and exp(lse) counts the "
    "visible keys. Multiplying v by 8 multiplies out by 8. The order of batch entries and heads "
    "does not matter.",
    text="exact closed forms",
)
ATTAINED = Guarantee(
    "attained",
    "bound attained",
    "The opposite of G1: where values underflow, the errors of the kernels of this repository come "
    "close to the bound, so that it is not wide there.",
)
FORMS = Guarantee(
    "forms",
    "of a mask agree",
    "The definition of a mask, its jit form, its block map and its relation agree.",
)
EXCEPTION = Guarantee(
    "exception",
    "computes or refuses",
    "A kernel returns a result, or refuses with NotImplementedError.",
    text="exception",
)
FORM = Guarantee(
    "form",
    "of outputs",
    "An output is a torch.Tensor, of no subclass, with the shape of its call and the dtype of the "
    "inputs. lse and pooled probabilities are float32, or float64 for float64 inputs.",
    text="form",
)
INPUTS = Guarantee(
    "inputs",
    "are not changed",
    "A call leaves its inputs and the global settings of PyTorch as they are: default device and "
    "dtype, grad mode, deterministic mode, threads, precision, and the state of generators.",
    text="inputs",
)
