"""What a pack holds of a photograph: its file as it is, a smaller JPEG of it, or its pixels.

Pillow decodes here, once and with the rules of every loader, so that grey, CMYK and 16 bits are plain RGB from then on.
"""

import io

from datasets.photos import decode

SHORT_SIDE = {"320": 320, "256": 256}  # the JPEGs
QUALITY = {"320": 90, "256": 85}
JPEG_BYTES = 0.3  # for a pixel, usually
LONG_SIDE = 500  # the pixels: most photographs of ImageNet are no larger, and keep every one

FORMS = {
    "original": "the files as they are",
    **{form: f"JPEGs with a short side of {short} at most" for form, short in SHORT_SIDE.items()},
    "raw": f"pixels, with a long side of {LONG_SIDE} at most: nothing is decoded any more",
}


def size(form, height, width):
    """(height, width) of what is stored of a picture; none is enlarged."""
    if form in SHORT_SIDE and min(height, width) > SHORT_SIDE[form]:
        return decode.resized(height, width, SHORT_SIDE[form])
    if form == "raw" and max(height, width) > LONG_SIDE:
        longest = max(height, width)
        return max(1, round(height * LONG_SIDE / longest)), max(1, round(width * LONG_SIDE / longest))
    return height, width


def expected(form, length, height, width):
    """The bytes of what is stored of a picture whose file has `length`; exact but for JPEGs that have yet to be made."""
    wanted = size(form, height, width)
    if form == "raw":
        return len(_header(*wanted)) + 3 * wanted[0] * wanted[1]
    return length if wanted == (height, width) else int(JPEG_BYTES * wanted[0] * wanted[1])


def stored(form, content, special, height, width):
    """(bytes, height, width) of what is stored of a file; what cannot be decoded stays as it is, with no height and width."""
    from PIL import Image

    wanted = size(form, height, width)
    whole = wanted == (height, width)
    if form == "original" or (form in SHORT_SIDE and whole and not special and content.startswith(b"\xff\xd8")):
        return content, height, width
    try:
        picture = decode.with_pillow(content)
    except Exception:  # whatever a damaged file makes a decoder say
        return content, 0, 0
    if not whole:  # it will be resized once more: bilinear twice is a blur
        picture = picture.resize((wanted[1], wanted[0]), Image.Resampling.BICUBIC)
    if form == "raw":
        return _header(*wanted) + picture.tobytes(), *wanted
    picture.save(buffer := io.BytesIO(), "JPEG", quality=QUALITY[form], optimize=True)
    return buffer.getvalue(), *wanted


def _header(height, width):
    """Of a PPM, which is plain pixels behind a line, and which any viewer shows."""
    return b"P6\n%d %d\n255\n" % (width, height)
