"""What ModelArts' pages say of a model package's config.json, as data, and the JSON schema that its APIs are told in."""

# The published fields of config.json: (type, whether it has to be there, what its value may be).
TEXT, NUMBER = (str, True, None), ((int, float), False, None)
ONE_OF = lambda *values: (str, True, values)  # noqa: E731
METRICS = dict.fromkeys(("f1", "recall", "precision", "accuracy"), NUMBER)
SIDE = {"Content-type": ONE_OF("application/json", "multipart/form-data"), "data": (dict, False, None)}
API = {"url": ONE_OF("/"), "method": ONE_OF("post", "get"), "request": (dict, True, SIDE), "response": (dict, True, SIDE)}
PACKAGE = {
    "package_name": TEXT,
    "package_version": (str, False, None),
    "restraint": (str, False, ("EXACT", "ATLEAST", "ATMOST")),
}
DEPENDENCY = {"installer": ONE_OF("pip"), "packages": (list, True, PACKAGE)}
CONFIG = {
    "model_algorithm": TEXT,
    "model_type": ONE_OF("PyTorch"),
    "runtime": (str, False, None),
    "metrics": (dict, False, METRICS),
    "apis": (list, False, API),
    "dependencies": (list, False, DEPENDENCY),
}


def complaints(value, fields, place="config"):
    for name in value.keys() - fields.keys():
        yield f"{place}.{name} is no published field"
    for name, (kind, needed, inner) in fields.items():
        if name not in value:
            if needed:
                yield f"{place}.{name} is missing"
            continue
        found = value[name]
        if not isinstance(found, kind):
            yield f"{place}.{name} is a {type(found).__name__}"
        elif isinstance(inner, tuple) and found not in inner:
            yield f"{place}.{name} is {found}"
        elif isinstance(inner, dict):
            for item in found if kind is list else [found]:
                yield from complaints(item, inner, f"{place}.{name}")


def check(value, schema):
    """JSON schema, as far as config.json has it: a list's `items` has one schema for all, or one for each place."""
    kinds = {"object": dict, "array": list, "string": str, "number": (int, float)}
    assert isinstance(value, kinds[schema["type"]]), (value, schema)
    if schema["type"] == "object":
        assert value.keys() == schema["properties"].keys()
        for name, inner in schema["properties"].items():
            check(value[name], inner)
    elif schema["type"] == "array":
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        inner = schema["items"]
        for item, one in zip(value, inner if len(inner) > 1 else inner * len(value)):
            check(item, one)
