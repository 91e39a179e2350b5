"""The forms in which a pack holds a photograph: its file as it is or in tiles, a smaller JPEG of it,
or its pixels.

A picture that a form changes is decoded by Pillow, by the rules of every loader: grey, CMYK and 16-bit
pictures become RGB.
"""

import io

from datasets.photos import decode, tiles

SHORT_SIDE = {"320": 320, "256": 256}  # of the JPEGs
QUALITY = {"320": 90, "256": 85}
TABLE = 1.05  # times the bytes of a file: tiles and their table take less
JPEG_BYTES = 0.3  # for each pixel, about
LONG_SIDE = 500  # of raw pixels: most photographs of ImageNet are no larger, so they are not resized

FORMS: dict[str, str] = {
    "original": "the files as they are",
    "tiled": (
        "the same pictures without loss, but each crop is decoded without the rest; needs the program "
        "jpegtran"
    ),
    **{form: f"JPEGs with a short side of {short} at most" for form, short in SHORT_SIDE.items()},
    "raw": f"pixels, with a long side of {LONG_SIDE} at most, which need no decoding",
}


def size(form: str, height: int, width: int) -> tuple[int, int]:
    """Return (height, width) in which a picture is stored; none is enlarged."""
    if form in SHORT_SIDE and min(height, width) > SHORT_SIDE[form]:
        return decode.resized_size(height, width, SHORT_SIDE[form])
    if form == "raw" and max(height, width) > LONG_SIDE:
        height, width = (max(1, round(side * LONG_SIDE / max(height, width))) for side in (height, width))
    return height, width


def expected_length(form: str, length: int, height: int, width: int) -> int:
    """Return how many bytes will be stored of a picture whose file has `length` bytes;
    an estimate if the form changes it."""
    height_kept, width_kept = size(form, height, width)
    if form == "raw":
        return len(_header(height_kept, width_kept)) + 3 * height_kept * width_kept
    if form == "tiled":
        return int(TABLE * length)
    return (
        length if (height_kept, width_kept) == (height, width) else int(JPEG_BYTES * height_kept * width_kept)
    )


def stored(form: str, content: bytes, special: bool, height: int, width: int) -> tuple[bytes, int, int]:
    """Return (bytes, height, width) to store.

    A file that the form cannot change is kept, with sides of 0 if decoding fails.
    """
    from PIL import Image

    stored_size = size(form, height, width)
    keeps_size = stored_size == (height, width)
    if form == "original" or (
        form in SHORT_SIDE and keeps_size and not special and content.startswith(b"\xff\xd8")
    ):
        return content, height, width
    if form == "tiled":
        try:
            return tiles.cut_into_tiles(content), height, width
        except tiles.NotTiled:  # stored as it is: loaders decode it as a whole
            return content, height, width
    try:
        picture = decode.decode_with_pillow(content)
    except Exception:  # a damaged file may cause any error in a decoder
        return content, 0, 0
    if not keeps_size:  # bicubic: a loader resizes it again, and bilinear twice would blur it
        picture = picture.resize((stored_size[1], stored_size[0]), Image.Resampling.BICUBIC)
    if form == "raw":
        return _header(*stored_size) + picture.tobytes(), *stored_size
    picture.save(buffer := io.BytesIO(), "JPEG", quality=QUALITY[form], optimize=True)
    return buffer.getvalue(), *stored_size


def _header(height: int, width: int) -> bytes:
    """Return the header of a PPM file, which has plain RGB pixels after it and can be opened by any
    viewer."""
    return b"P6\n%d %d\n255\n" % (width, height)
