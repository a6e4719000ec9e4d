"""``bench codec``: codecs, and compressors of other projects."""
