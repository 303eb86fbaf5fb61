"""What runs in the trainer: taps on models, flushes of changed rows, and their delivery."""

from headrace.streamer.api import RawEmbeddingStreamer, detach
from headrace.streamer.config import StreamerConfig
from headrace.streamer.stats import StreamerStats
from headrace.streamer.table_source import SourceRows, StreamedSource, TableSource

__all__ = [
    "RawEmbeddingStreamer",
    "SourceRows",
    "StreamedSource",
    "StreamerConfig",
    "StreamerStats",
    "TableSource",
    "detach",
]
