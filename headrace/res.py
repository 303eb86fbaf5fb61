"""Raw embedding streaming (RES) of FBGEMM, with a parameter server behind it: `headrace.res.install(...)`."""

from headrace.streamer.res_stand_in import install

__all__ = ["install"]
