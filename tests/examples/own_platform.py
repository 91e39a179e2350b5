from common.world.rules import node


def skyline(context):
    """Skyline starts a job once on each node, and sets SKY_NODES, SKY_NODE and the first node's address in SKY_FIRST."""
    if not context.has("SKY_NODES"):
        return None
    nodes, rank = context.number("SKY_NODES"), context.number("SKY_NODE")
    return node(context, "skyline", "SKY_NODES and SKY_NODE", rank, nodes, context.env.get("SKY_FIRST"))
