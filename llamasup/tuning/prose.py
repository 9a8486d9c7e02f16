"""The text of the prompts of a measurement. Written for it, so it is under the licence of llamasup."""

from __future__ import annotations

__all__ = ["PROSE"]

PROSE = """
The harbour was quiet when the last boat came in. Two men tied it to the pier, and a third carried the
nets to the shed behind the market. Rain had fallen all day, and the stones shone under the lamps. There
was little talk. In the shed, an old woman counted the baskets, wrote the numbers into a book, and asked
about the weather at sea. They said that the wind had turned to the north, and that the water was colder
than in other years. She nodded, because she had expected as much. The price of fish would rise, she
said, and the people in the town would complain, as they did each winter. Then she closed the book and
sent them home. On the way up the hill, the youngest of the three stopped at the school and looked
through a window. A lamp still burned there. The teacher sat at her desk with a pile of papers, and read
one after the other with a pencil in her hand. He wanted to knock, but his hands smelled of fish and tar,
so he went on. At home he made tea, lit the stove, and took a letter from the drawer. It was from his
brother, who worked on the railway in the south, where the orchards begin. The brother wrote about
bridges: how each beam is measured twice, how rivets are heated until they glow, and how an engineer
walks the whole length of the track before the first train may cross. In the evening the workers sit near
the river, and one of them plays the accordion. He read the letter again and thought about measuring
things twice. In the morning the wind was still from the north. He went down to the harbour before
sunrise, checked each rope, and wrote the depth of the water on a board, as the old woman had asked him
to do.
""".strip().replace("\n", " ")
