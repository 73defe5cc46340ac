"""A short text to calibrate with where no file is given: prose of several kinds, code and languages."""

BUILT_IN = [
    "The river that runs through the old town is not wide, but it has shaped every street beside it. In "
    "spring, when the snow melts in the hills, the water rises by two or three metres and covers the "
    "lower steps of the market. Traders used to pull their carts uphill on those days and sell bread, "
    "salt and candles from the church yard. Nobody was surprised; the marks on the wall of the mill show "
    "1784, 1845 and 1926, and each of them has its own story.",
    "To measure the resistance of a wire, connect it to a battery and an ammeter in series, and a "
    "voltmeter in parallel. Read both instruments at five different voltages. If the points lie on a "
    "straight line through the origin, the resistance is the slope. A longer wire has a larger "
    "resistance; doubling the diameter divides it by four. Let the wire cool between readings, because "
    "warm metal conducts less well.",
    '"You are late," said Maria, and put the kettle back on the stove. "The bus did not come," he '
    'answered. "I walked the last six kilometres, and then it started to rain." She looked at his shoes, '
    "laughed, and told him that there was still some soup. They did not talk about the letter until the "
    "children were asleep.",
    'def mean(values):\n    """The arithmetic mean of a sequence of numbers."""\n    total = 0.0\n    '
    "count = 0\n    for value in values:\n        total += value\n        count += 1\n    if count == "
    '0:\n        raise ValueError("no values")\n    return total / count\n\nprint(mean([1, 2, 3, 4]))  # '
    "2.5\n",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long does the journey take? Answer: From "
    "9:40 to 12:00 are two hours and twenty minutes, and five more minutes follow. The journey takes 2 "
    "hours and 25 minutes. Question: Which is larger, 3/8 or 0.4? Answer: 3/8 is 0.375, so 0.4 is larger.",
    "The committee met on Tuesday to discuss the budget for the coming year. Spending on schools will "
    "grow by 4.2 percent, while the amount for roads stays the same. Several members asked why the new "
    "library had cost more than planned. The mayor explained that prices of steel and glass went up "
    "during the work, and that the final report will be published in March. The vote was 14 to 9.",
    "Dear Sir or Madam, thank you for your order of 12 May. Unfortunately, two of the items are out of "
    "stock. We can send the rest today, or everything together next week. Please tell us which you "
    "prefer. Items:\n- 3 notebooks (A5, lined)\n- 1 desk lamp\n- 20 envelopes\nKind regards, the "
    "customer service team",
    "Cells are the smallest units of living things. A plant cell has a firm wall and, in its green "
    "parts, chloroplasts, which turn light, water and carbon dioxide into sugar and oxygen. Animal cells "
    "have neither. Both kinds have a nucleus with the genetic material, and mitochondria, where sugar is "
    "broken down and energy is set free. Bacteria are much smaller and have no nucleus at all.",
    "Il fait froid ce matin, mais le soleil brille sur les toits. Der Zug nach Hamburg hat heute zehn "
    "Minuten Verspätung. El mercado abre a las ocho y cierra a las dos. La strada che porta al mare è "
    "lunga e tranquilla.",
    "Mix 250 g of flour with a pinch of salt. Rub in 125 g of cold butter until the mixture looks like "
    "crumbs, add one egg and two spoons of water, and form a ball. Let it rest in the fridge for half an "
    "hour. Roll it out, line a tin, and bake it at 190 degrees for fifteen minutes before you add the "
    "filling.",
]
