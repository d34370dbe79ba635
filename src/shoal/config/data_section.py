"""The section `data:` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.blueprint.validation.bounds import MOST_BATCH, MOST_SEQUENCE
from shoal.config.data_source import Format, SourceField, WeightedSource
from shoal.config.fields import BelowOne, PositiveInt, Section


class DataSection(Section):
    """The training data, and how it is cut into samples."""

    source: SourceField = "python"
    """`python`: the source of Python's own standard library, which every machine has. `synthetic`: generated samples.
    `hf:NAME`: a Hugging Face dataset. Else a path or a URL: a text file, `.jsonl`, token shards (`.bin`, `.npy`),
    `.parquet`, or a folder of one of these; or a folder with one folder of images per class. A URL
    (`s3://bucket/shards`, `https://...`) is copied into the cache. Several with weights are a mixture: `{corpus/: 0.7,
    chat.jsonl: 0.3}` (docs/data.md)."""

    format: Format = "auto"
    """The format of the files at a path. chat: JSONL or Parquet with conversations or instructions, of which answers
    alone are trained (docs/finetune.md). classes: JSONL or Parquet with a `text` and its `label`, for a classifier.
    pairs: with a `source` and its `target`, for an encoder with a decoder (docs/huggingface.md). auto: by their
    endings; JSONL by the keys of its first line, Parquet by its columns."""

    tokenizer: str = "auto"
    """`bytes`: every byte is a token. Else a Hugging Face `tokenizer.json`, or a folder with one, whose chat template
    is used (needs the extra `hf`). auto: that of a model `hf:FOLDER`, else bytes."""

    pack: bool = False
    """Of conversations: True: several share a sample, and none sees another. False: each is padded to `seq_len`."""

    seq_len: Annotated[PositiveInt, Field(le=MOST_SEQUENCE)] = 256
    """Tokens per sample."""

    global_batch: Annotated[PositiveInt, Field(le=MOST_BATCH)] = 32
    """Samples per optimizer step, over all ranks and microbatches. It does not change with the number of ranks."""

    mask_documents: bool = False
    """True: documents packed into one sample do not attend to each other, and none predicts the next one's first
    token."""

    validation: BelowOne = 0.01
    """The fraction of the samples that is held out for evaluation."""

    text_field: str = "text"
    """The key that holds the text in JSONL, or the column in a Hugging Face dataset or in Parquet. A column of Parquet
    may also hold lists of token ids."""

    cache: str | None = None
    """The folder for files of URLs, and for tokens of Parquet files and of streams. None: ~/.cache/shoal/data."""

    streaming: bool = False
    """Of `hf:NAME`: True: read its rows one by one, and store only their tokens, in the cache. False: download the
    dataset, and hold its tokens in memory (docs/data.md)."""

    streaming_tokens: PositiveInt | None = None
    """Under `streaming`, the number of tokens to take. None: all."""

    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """The dtype of tokens in a `.bin` file."""

    end_token: Annotated[int, Field(ge=0)] | None = None
    """The token id that ends a document in token shards; `mask_documents` needs it there. In rows of token ids, it is
    added to each that does not end with it. Text uses the tokenizer's."""

    image_size: PositiveInt = 32
    """Height and width that images are scaled to."""

    synthetic_samples: PositiveInt = 4096
    """The number of samples of `synthetic`."""

    synthetic_kind: Literal["tokens", "images"] = "tokens"
    """The kind of samples of `synthetic`."""

    vocabulary: PositiveInt = 256
    """The number of different tokens of `synthetic`, or of classes of its images."""

    changed: Literal["reject", "accept"] = "reject"
    """Whether a run resumes when `source` has changed since its checkpoint was saved. The number of samples and a
    fingerprint of them are compared (docs/concepts/data-order.md). accept: resume on the changed data."""

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that prepare batches. 0: a thread of the training process. auto: time the first batches, and start
    processes if one takes more than 10 ms."""

    prefetch: PositiveInt = 2
    """Batches prepared ahead, per worker."""

    def of(self, source: WeightedSource) -> DataSection:
        """The settings of one source of a mixture."""
        own = {"source": source.source, "format": source.format or self.format}
        return self.model_copy(update={**own, "text_field": source.text_field or self.text_field})

    @property
    def each(self) -> tuple[DataSection, ...]:
        """The settings of every source: of a single one, these."""
        return (self,) if isinstance(self.source, str) else tuple(map(self.of, self.source))
