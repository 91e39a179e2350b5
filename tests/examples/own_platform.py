from common.world.rules import node


def skyline(given):
    """Skyline starts a job once on each node, and sets SKY_NODES, SKY_NODE and the first node's address in SKY_FIRST."""
    if not given.has("SKY_NODES"):
        return None
    nodes, rank = given.number("SKY_NODES"), given.number("SKY_NODE")
    return node(given, "skyline", "SKY_NODES and SKY_NODE", rank, nodes, given.env.get("SKY_FIRST"))
